"""Every rank of a mesh, one after the other in one process: torch's process group `fake` sends
nothing, and tensors are sharded without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def mesh_at(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be this rank of a mesh."""
    size = math.prod(sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        # Names of its own: torch caches results by mesh, and for it a process is one rank.
        names = tuple(f"d{number}-{rank}" for number in range(len(sizes)))
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def meshes(sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be each rank of a mesh in turn."""
    for rank in range(math.prod(sizes)):
        with mesh_at(rank, sizes) as mesh:
            yield mesh


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose values are their own indices."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def with_tensor_parallelism(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> nn.Module:
    """FSDP2 over a `weight` split by the last dimension of the mesh, and an `other`, as the one of
    a normalization, that is not."""
    *data, last = mesh.mesh_dim_names or ()
    model = nn.Module()
    split = distribute_tensor(whole, mesh[last], [Shard(dim)], src_data_rank=None)
    model.weight, model.other = nn.Parameter(split), nn.Parameter(whole)
    fully_shard(model, mesh=mesh[tuple(data)])
    return model
