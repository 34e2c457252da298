"""`torchelastic.mesh`: the device mesh of this worker's replica, made before there is a world."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.errors import ConfigError
from torchelastic.training.group.replica import Replica

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: How long a collective in a replica may take. (`train` ends the waits of a world that is over.)
TIMEOUT = timedelta(minutes=30)

_replica: Replica | None = None


def mesh(
    sizes: Mapping[str, int],
    *,
    data: Iterable[str] = ("shard",),
    device_type: str | None = None,
) -> DeviceMesh:
    """Return the device mesh of this worker's replica: `mesh({"shard": 4, "tensor": 2})`.

    Call it once, before the model is sharded over it, in a script that calls `torchelastic.train`.
    It makes the replica the default group of torch.distributed, so do not call
    `init_process_group`. Until `train` has entered a world, nothing can be sent: build the model
    without communication, from the same seed on all workers.

    Workers along the dimensions named in `data` read different samples; all others of the replica
    read the same ones. Use the dimensions in `data` for FSDP2, the others for tensor parallelism.
    `device_type` is "cuda", with NCCL, where torch finds a GPU, else "cpu".
    """
    global _replica
    if _replica is not None:
        raise ConfigError("torchelastic.mesh makes one mesh per process: use the one it returned.")
    _check_sizes(sizes)
    local_size = env.get("LOCAL_WORLD_SIZE")
    if local_size is None:
        raise ConfigError(
            "This process has no agent, so it has no replica: start the script with "
            "'torchelastic run'."
        )
    asked = env.get("TORCHELASTIC_REPLICA_SIZE")
    coordinate = coordinate_of(
        math.prod(sizes.values()),
        asked=int(asked) if asked else None,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_size=int(local_size),
        place=int(env.get("TORCHELASTIC_REPLICA_PLACE", "0")),
    )
    _require_reset()
    import torch

    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device_type == "cuda" else ""
    replica = Replica(math.prod(sizes.values()), coordinate, TIMEOUT, backend)
    _place_data(replica, sizes, tuple(data))
    _replica = replica
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def current() -> Replica | None:
    """Return this worker's replica; None if `mesh` was not called."""
    return _replica


def coordinate_of(
    size: int, *, asked: int | None, local_rank: int, local_size: int, place: int
) -> int:
    """Return a worker's rank in its replica of this size. Pure.

    `asked` is the value of --replica-size, `place` the node's place among those of its replica.
    """
    if asked is not None and asked != size:
        raise ConfigError(
            f"The mesh has {size} workers, but --replica-size is {asked}: make them equal."
        )
    if local_size % size == 0:
        return local_rank % size
    if asked is None:
        spans = size % local_size == 0
        raise ConfigError(
            f"The mesh has {size} workers, and this node has {local_size}: --nproc-per-node must "
            f"be a multiple of {size}"
            + (f", or pass --replica-size {size} for a replica on several nodes." if spans else ".")
        )
    return place * local_size + local_rank


def _check_sizes(sizes: Mapping[str, int]) -> None:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ConfigError(
            f"torchelastic.mesh takes names with sizes of at least 1, not {dict(sizes)!r}: "
            'for example {"shard": 4, "tensor": 2}.'
        )


def _place_data(replica: Replica, sizes: Mapping[str, int], data: tuple[str, ...]) -> None:
    """Find out which samples this worker reads, and whether it records them."""
    if unknown := [name for name in data if name not in sizes and data != ("shard",)]:
        raise ConfigError(f"data names {unknown[0]!r}, which is not a dimension of the mesh.")
    rest = replica.coordinate
    position: dict[str, int] = {}
    for name, size in reversed([*sizes.items()]):
        rest, position[name] = divmod(rest, size)
    replica.data_rank, replica.data_size, replica.is_recorder = 0, 1, True
    for name, size in sizes.items():
        if name in data:
            replica.data_rank = replica.data_rank * size + position[name]
            replica.data_size *= size
        elif position[name]:
            replica.is_recorder = False


def _require_reset() -> None:
    import torch
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(
            f"torch {torch.__version__} cannot take back a step of FSDP2 that was interrupted "
            "(FSDPModule.reset_iter_state): sharded training in torchelastic.train needs torch "
            "2.13 or later. Scripts with restore() and commit() work with this release."
        )
