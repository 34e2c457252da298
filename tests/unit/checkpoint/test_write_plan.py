"""Checkpoints return what they were given; and who writes which part."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.fake_mesh import meshes, numbers, with_tensor_parallelism
from torchelastic.checkpoint import write_plan
from torchelastic.checkpoint.catalog import Draft
from torchelastic.checkpoint.storage import dcp_files
from torchelastic.checkpoint.storage.storage import LocalStorage
from torchelastic.checkpoint.write_plan import Planner
from torchelastic.errors import CheckpointError
from torchelastic.tensors.dtensors import local_of, region_of


def again(value):
    skeleton, tensors = write_plan.flatten(value)
    return write_plan.restore(json.loads(json.dumps(skeleton)), tensors)


def test_plain_values_come_back_as_they_were():
    values = [None, True, 3, 2**80, 0.1, -math.inf, "text", b"\x00\xff", [], {}, ()]
    values += [
        [1, [2, (3, {})]],
        {"a": {"b": [None]}, "!": "mine"},
        {0: "int", True: "bool", None: "none", "1": "text", 1.5: "float"},
        {"dtype": torch.bfloat16},
    ]
    for value in values:
        found = again(value)
        assert found == value
        assert repr(found) == repr(value)
    assert math.isnan(again([math.nan])[0])


def test_a_skeleton_is_written_as_it_always_was():
    tree = {
        "model": {"fc.weight": torch.ones(2)},
        "rest": (1, 2.5, None, True, b"\x00\xff", torch.bfloat16, [torch.zeros(1)]),
        "by key": {0: "int", None: -math.inf, "!": "mine"},
    }
    skeleton, tensors = write_plan.flatten(tree, "own")
    assert list(tensors) == ["own.model.fc.weight", "own.rest.6.0"]
    assert json.dumps(skeleton) == (
        '{"model": {"fc.weight": {"!": "tensor", "name": "own.model.fc.weight"}}, '
        '"rest": {"!": "tuple", "items": [1, 2.5, null, true, '
        '{"!": "bytes", "base64": "AP8="}, {"!": "dtype", "name": "bfloat16"}, '
        '[{"!": "tensor", "name": "own.rest.6.0"}]]}, '
        '"by key": {"!": "dict", "items": [[0, "int"], [null, -Infinity], ["!", "mine"]]}}'
    )


def test_tensors_have_dotted_names():
    one, two = torch.ones(2), torch.zeros(3)
    _, tensors = write_plan.flatten({"model": {"fc.weight": one}, "list": [two]})
    assert set(tensors) == {"model.fc.weight", "list.0"}
    assert again({"m": (one, {"x": two})})["m"][1]["x"] is two


def test_flatten_refuses_unsupported_values_by_path():
    for value in ({1, 2}, object(), 1j, range(3)):
        with pytest.raises(CheckpointError, match=r"cannot hold 'a\.b\.1', a "):
            write_plan.flatten({"a": {"b": [0, value]}})


# --- who writes what ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "loads"),
    [
        ({"a": 5, "b": 4, "c": 3}, 1, [12]),
        ({"a": 5, "b": 4, "c": 3}, 2, [5, 7]),
        ({"a": 5, "b": 4, "c": 3}, 5, [5, 4, 3, 0, 0]),
        ({chr(i): 1 for i in range(97, 107)}, 4, [3, 3, 2, 2]),
        ({}, 2, [0, 0]),
    ],
)
def test_plain_tensors_are_shared_out_between_ranks(sizes, ranks, loads):
    owners = write_plan.owners_of(sizes, ranks)
    assert set(owners) == set(sizes)
    found = [sum(sizes[n] for n, rank in owners.items() if rank == r) for r in range(ranks)]
    assert sorted(found) == sorted(loads)
    assert write_plan.owners_of(dict(reversed(sizes.items())), ranks) == owners


def test_each_tensor_falls_to_one_rank_and_own_ones_to_their_own():
    state = {"model": {f"w{i}": torch.full((i + 1,), i) for i in range(7)}}
    own = {"rng": torch.ones(1)}
    found = [write_plan.Planner().content(state, own, rank=r, size=3) for r in range(3)]
    names = [name for content in found for name in content.tensors]
    assert len(names) == len(set(names)) == 7 + 1 + 3 * 2
    for rank, content in enumerate(found):
        assert f"torchelastic.own.{rank}.rng" in content.tensors


def test_names_that_would_be_the_same_stay_apart():
    one, two, three, four, five = (torch.tensor(float(i)) for i in range(5))
    given = {"a": {"b": one}, "a.b": two, 1: three, "1": four, "torchelastic.skeleton": five}
    content = write_plan.Planner().content(given, own={"skeleton": one})
    found = write_plan.restore(
        write_plan.from_tensor(content.tensors[write_plan.SKELETON]), content.tensors
    )
    assert found == given
    own = write_plan.from_tensor(content.tensors[write_plan.own_skeleton(0)])
    assert write_plan.restore(own, content.tensors) == {"skeleton": one}


def test_the_same_form_is_planned_once():
    planner = write_plan.Planner()

    def content(count, **more):
        return planner.content({"w": torch.full((3,), float(count)), "n": count, **more})

    first = content(1)
    second = content(123_456)
    assert second.plan is first.plan
    assert second.tensors["w"].eq(123_456).all()
    for other in (content(1, v=torch.ones(1)), content(1, v=torch.ones(1).double())):
        assert other.plan is not first.plan
        assert [item.index.fqn for item in other.plan.items] == ["w", "v", write_plan.SKELETON]


# --- files of shards ------------------------------------------------------------------------------


def fsdp(whole, mesh):
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def both(whole, mesh):
    return with_tensor_parallelism(whole, mesh).weight.detach()


def hybrid(whole, mesh):
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)


def several(whole, mesh):
    """A strided shard without one on its right: two boxes on each rank."""
    count, rank = mesh.size(), mesh.get_local_rank()
    halves = [(*half.chunk(count), *[half[:0]] * count)[rank] for half in whole.chunk(2)]
    return DTensor.from_local(
        torch.cat(halves),
        mesh,
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


LAYOUTS = {
    "4": (fsdp, (4,)),
    "1": (fsdp, (1,)),
    "2x2 with tensor parallelism": (both, (2, 2)),
    "4x2, where nine rows are uneven": (both, (4, 2)),
    "2x2, hybrid": (hybrid, (2, 2)),
    "2, two boxes each": (several, (2,)),
}


def save(storage, make, sizes, whole):
    parts, files = [], Draft(storage, "one")
    for rank, mesh in enumerate(meshes(sizes)):
        size = mesh.size()
        content = Planner().content({"w": make(whole, mesh)}, rank=rank, size=max(size, 2))
        parts.append(dcp_files.write_part(files, content.plan, content.tensors, rank))
    dcp_files.complete(files, parts)
    files.release()
    return files.directory


@pytest.mark.parametrize("shape", [(8, 3), (9, 2), (3, 2), (0, 3)])
@pytest.mark.parametrize("before", LAYOUTS)
def test_any_layout_reads_what_any_other_has_written(before, shape, tmp_path):
    whole, storage = numbers(shape), LocalStorage(tmp_path)
    directory = save(storage, *LAYOUTS[before], whole)
    for make, sizes in LAYOUTS.values():
        for rank, mesh in enumerate(meshes(sizes)):
            wanted = make(whole, mesh)
            like = {"w": torch.zeros_like(wanted)}
            found, _ = dcp_files.read(storage, directory, like, rank=rank)
            assert torch.equal(local_of(found["w"]), local_of(wanted)), (before, sizes, rank)
            assert region_of("w", found["w"]) == region_of("w", wanted)
    found, _ = dcp_files.read(storage, directory)
    assert torch.equal(found["w"], whole)


def test_another_shape_is_refused(tmp_path):
    storage = LocalStorage(tmp_path)
    directory = save(storage, fsdp, (2,), numbers((4, 3)))
    for mesh in meshes((1,)):
        with pytest.raises(CheckpointError, match=r"'w' .* does not have the shape \(5, 3\)"):
            dcp_files.read(storage, directory, {"w": fsdp(numbers((5, 3)), mesh)})
