"""Which part of a tensor a rank holds: a table, and what torch itself gives every rank of many
meshes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support import SOAK
from tests.unit.fake_mesh import mesh_at, meshes, numbers, with_tensor_parallelism
from torchelastic.tensors.dtensors import local_of, region_of
from torchelastic.tensors.shard_layout import Box, Lost, Region, Split, Take, region, takes

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
def test_region_after_splits(shape, splits, ranges):
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


def test_region_of_unsupported_or_foreign_tensors():
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


# --- boxes of pieces ------------------------------------------------------------------------------


def parts(shape, mesh):
    """The shards of a tensor whose first dimensions are cut by the mesh's, by rank."""
    return [
        region(shape, [Split(dim, mesh[dim], at) for dim, at in enumerate(place)])
        for place in itertools.product(*map(range, mesh))
    ]


def strided(length, mesh):
    """The shards of FSDP2 on top of column-wise tensor parallelism, by rank."""
    return [
        region((length,), [Split(0, mesh[0], data, mesh[1]), Split(0, mesh[1], tensor)])
        for data, tensor in itertools.product(*map(range, mesh))
    ]


def cells(boxes):
    """The elements of boxes, and how often each is there."""
    return Counter(
        cell
        for box in boxes
        for cell in itertools.product(
            *(range(b, b + n) for b, n in zip(box.offset, box.size, strict=True))
        )
    )


def boxes(part):
    return [box for box, _ in part.boxes()]


def values(part):
    """A rank's own tensor: each element is its place in the whole one."""
    found = {}
    for box, at in part.boxes():
        for cell in itertools.product(*map(range, box.size)):
            found[tuple(map(int.__add__, at, cell))] = tuple(map(int.__add__, box.offset, cell))
    return found


def pieces_of(held):
    return [(f"piece {rank}", {"w": part}) for rank, part in enumerate(held)]


def check_takes(need, held):
    """Copying gives a rank the elements it needs, each once, at its place."""
    found, lost = takes({"w": need}, pieces_of(held))
    assert lost == []
    made = {}
    for take in found:
        source = values(held[int(take.piece.removeprefix("piece "))])
        for cell in itertools.product(*map(range, take.box.size)):
            target = tuple(map(int.__add__, take.target, cell))
            assert target not in made
            made[target] = source[tuple(map(int.__add__, take.source, cell))]
    assert made == values(need)


@pytest.mark.parametrize(
    ("shape", "old", "new", "rank", "expected"),
    [
        ((4,), (2,), (2,), 1, [(1, (2,), (2,))]),
        ((4,), (2,), (1,), 0, [(0, (0,), (2,)), (1, (2,), (2,))]),
        ((5,), (2,), (3,), 1, [(0, (2,), (1,)), (1, (3,), (1,))]),
        ((3,), (2,), (4,), 3, []),  # more ranks than rows: nothing is needed
        ((4, 6), (2, 1), (1, 2), 1, [(0, (0, 3), (2, 3)), (1, (2, 3), (2, 3))]),
    ],
)
def test_takes_cover_a_shard_with_the_boxes_of_pieces(shape, old, new, rank, expected):
    found, lost = takes({"w": parts(shape, new)[rank]}, pieces_of(parts(shape, old)))
    assert [(take.piece, take.box) for take in found] == [
        (f"piece {piece}", Box(*box)) for piece, *box in expected
    ]
    assert lost == []


worlds = st.integers(1, 7)
pairs = st.tuples(worlds, worlds)


@given(st.tuples(st.integers(0, 12), st.integers(0, 9)), pairs, pairs)
@settings(max_examples=50 * SOAK)
def test_any_world_reads_what_any_other_has_written(shape, old, new):
    held = parts(shape, old)
    for need in parts(shape, new):
        check_takes(need, held)


@given(st.integers(0, 20), pairs, pairs, worlds)
@settings(max_examples=50 * SOAK)
def test_with_tensor_parallelism_before_after_and_on_both_sides(length, old, new, plain):
    """The meshes may be 4 by 2 before, 2 by 1 afterwards, or one without tensor parallelism."""
    for before, after in itertools.product(
        (strided(length, old), parts((length,), (plain,))),
        (strided(length, new), parts((length,), (plain,))),
    ):
        for need in after:
            check_takes(need, before)


@given(st.integers(0, 20), st.tuples(worlds, st.integers(2, 4)), worlds)
@settings(max_examples=50 * SOAK)
def test_shards_of_several_boxes(length, cut, plain):
    count, factor = cut
    several = [region((length,), [Split(0, count, at, factor)]) for at in range(count)]
    for need in parts((length,), (plain,)):
        check_takes(need, several)
    for need in several:
        check_takes(need, parts((length,), (plain,)))


@given(st.integers(1, 12), worlds, worlds, st.integers(0, 6))
@settings(max_examples=50 * SOAK)
def test_a_lost_piece_is_noticed_by_whom_it_concerns(length, old, new, missing):
    held = parts((length,), (old,))
    lost_cells = cells(boxes(held[missing % old]))
    left = [part for rank, part in enumerate(held) if rank != missing % old]
    for need in parts((length,), (new,)):
        _, lost = takes({"w": need}, pieces_of(left))
        assert cells(one.box for one in lost) == cells(boxes(need)) & lost_cells


def test_of_copies_the_first_is_taken_and_a_number_is_a_box_without_dimensions():
    whole, number = Region((((0, 4),),)), Region(())
    for part in (whole, number):
        ((box, at),) = part.boxes()
        found = takes({"w": part}, pieces_of([part, part]))
        assert found == ([Take("w", "piece 0", box, at, at)], [])
    assert takes({"w": number}, []) == ([], [Lost("w", Box((), ()))])


def test_takes_name_the_lost_parts():
    _, lost = takes({"w": parts((4, 3), (2, 1))[1], "n": Region(())}, [])
    assert list(map(str, lost)) == ["[2:4, 0:3] of w", "n"]
