"""Files of sharded tensors: any mesh reads what any other has written, box by box."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.fake_mesh import meshes, numbers, with_tensor_parallelism
from torchelastic.checkpoint.catalog import Draft
from torchelastic.checkpoint.storage import dcp_files
from torchelastic.checkpoint.storage.storage import LocalStorage
from torchelastic.checkpoint.write_plan import Planner
from torchelastic.errors import CheckpointError
from torchelastic.tensors.dtensors import local_of, region_of


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
