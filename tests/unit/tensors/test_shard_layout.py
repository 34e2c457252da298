"""Which part of a tensor a rank holds: a table, and what torch itself gives every rank of many
meshes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.fake_mesh import mesh_at, meshes, numbers, with_tensor_parallelism
from torchelastic.tensors.dtensors import local_of, region_of
from torchelastic.tensors.shard_layout import Region, Split, region

NOTHING = ()


@pytest.mark.parametrize(
    ("shape", "splits", "ranges"),
    [
        pytest.param((6, 3), [], [[(0, 6)], [(0, 3)]], id="replicated"),
        pytest.param((), [], [], id="a number"),
        pytest.param((7,), [Split(0, 3, 2)], [[(6, 1)]], id="a shorter one"),
        pytest.param((4,), [Split(0, 3, 2)], [NOTHING], id="none is left"),
        pytest.param((0,), [Split(0, 3, 0)], [NOTHING], id="there is none"),
        pytest.param((8, 6), [Split(0, 2, 1), Split(1, 3, 0)], [[(4, 4)], [(0, 2)]], id="both"),
        pytest.param((8,), [Split(0, 2, 1), Split(0, 2, 0)], [[(4, 2)]], id="left to right"),
        pytest.param((8,), [Split(0, 2, 1, 2), Split(0, 2, 0)], [[(2, 2)]], id="right to left"),
        # torch.chunk of [0:5] and [5:9] into four: the first leaves nothing for the last rank.
        pytest.param((9,), [Split(0, 4, 3, 2), Split(0, 2, 0)], [NOTHING], id="uneven, first"),
        pytest.param((9,), [Split(0, 4, 3, 2), Split(0, 2, 1)], [[(8, 1)]], id="uneven, last"),
        pytest.param((8,), [Split(0, 2, 1, 2)], [[(2, 2), (6, 2)]], id="several boxes"),
        pytest.param((8,), [Split(0, 2, 0, 4)], [[(0, 1), (2, 1), (4, 1), (6, 1)]], id="more"),
        pytest.param((8,), [Split(0, 2, 0, 4), Split(0, 2, 1)], [[(4, 1), (6, 1)]], id="cut again"),
        pytest.param(
            (8,), [Split(0, 2, 1, 4), Split(0, 2, 0), Split(0, 2, 1)], [[(3, 1)]], id="after two"
        ),
    ],
)
def test_what_is_left_after_the_splits(shape, splits, ranges):
    found = region(shape, splits)
    assert found == Region(tuple(map(tuple, ranges)))
    assert Region.of_boxes(box for box, _ in found.boxes()) == found or not found.boxes()


# --- as torch does it -----------------------------------------------------------------------------


def check(tensor, whole):
    """The part that we say this rank has is the one it has."""
    local = local_of(tensor)
    seen = torch.full_like(local, -1)
    for box, at in region_of("w", tensor).boxes():
        ends = zip(at, box.size, strict=True)
        target = tuple(slice(begin, begin + length) for begin, length in ends)
        ends = zip(box.offset, box.size, strict=True)
        seen[target] = whole[tuple(slice(begin, begin + length) for begin, length in ends)]
    assert torch.equal(seen, local), (tensor.placements, tensor.device_mesh.shape, whole.shape)


CHANCE = random.Random(11)
MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


def layouts(count):
    for _ in range(count):
        sizes = CHANCE.choice(MESHES)
        shape = tuple(CHANCE.randint(0, 9) for _ in range(CHANCE.randint(1, 3)))
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        yield shape, sizes, tuple(CHANCE.choice(kinds) for _ in sizes)


@pytest.mark.parametrize(("shape", "sizes", "placements"), list(layouts(25)))
def test_any_shards_on_any_mesh(shape, sizes, placements):
    whole = numbers(shape)
    for mesh in meshes(sizes):
        check(distribute_tensor(whole, mesh, placements, src_data_rank=None), whole)


@pytest.mark.parametrize("shape", [(8, 3), (9, 4), (5, 2), (1, 6), (16,)])
@pytest.mark.parametrize(
    ("sizes", "dim"), [((2, 2), 0), ((4, 2), 0), ((2, 3), 0), ((2, 2), 1), ((2, 2, 2), 0)]
)
def test_fsdp2_on_top_of_tensor_parallelism(shape, sizes, dim):
    """Column-wise (dim 0: strided shards) and row-wise; the last of three dimensions is tensor
    parallel, the first replicates."""
    dim, whole = min(dim, len(shape) - 1), numbers(shape)
    for mesh in meshes(sizes):
        model = with_tensor_parallelism(whole, mesh, dim)
        check(model.weight, whole)
        check(model.other, whole)
        check(torch.zeros_like(model.weight), torch.zeros(shape))
        strided = any(isinstance(one, _StridedShard) for one in model.weight.placements)
        assert strided == (dim == 0)


@pytest.mark.parametrize("length", [8, 12, 7, 5, 2])
@pytest.mark.parametrize(("parts", "factor"), [(2, 2), (3, 2), (2, 3)])
def test_a_strided_shard_alone_is_several_boxes(length, parts, factor):
    whole = numbers((length, 2))
    for rank, mesh in enumerate(meshes((parts,))):
        local = torch.cat(
            [(*part.chunk(parts), *[part[:0]] * parts)[rank] for part in whole.chunk(factor)]
        )
        placement = _StridedShard(0, split_factor=factor)
        made = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=whole.shape, stride=(2, 1)
        )
        check(made, whole)


def test_what_no_rank_holds_and_who_is_not_of_the_mesh():
    with mesh_at(0, (4,)) as mesh:
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(TypeError, match="with placement Partial, no rank holds its values"):
            region_of("w", partial)
        uneven = DTensor.from_local(
            torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,)
        )
        with pytest.raises(TypeError, match=r"holds a shard of shape \(3,\).* means \(2,\)"):
            region_of("w", uneven)
    with mesh_at(3, (4,)):
        other = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        assert region_of("w", other).boxes() == []


def test_every_element_is_held_by_as_many_ranks_as_there_are_replicas():
    shape, sizes = (7, 5), (2, 2, 3)
    held = torch.zeros(shape)
    for at in itertools.product(*map(range, sizes)):
        splits = [Split(0, sizes[1], at[1], sizes[2]), Split(0, sizes[2], at[2])]
        for box, _ in region(shape, splits).boxes():
            held[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] += 1
    assert torch.equal(held, torch.full(shape, float(sizes[0])))
