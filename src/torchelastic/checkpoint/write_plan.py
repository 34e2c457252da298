"""The write plan: which rank writes which tensors of a state, for torch.distributed.checkpoint.

A tree is the same on all ranks except for its DTensors, of which each rank has its shards. A tensor
that all ranks have is written by one of them, chosen by names and sizes alone, so that ranks need
not communicate. Data that differs between ranks is `own`, and each rank writes it under its rank.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from torchelastic import torch_private
from torchelastic.checkpoint.background.staging import Slots, layout
from torchelastic.errors import CheckpointError
from torchelastic.tensors import checkpoint_tree

#: Reserved tensor names: the skeletons of trees, as bytes.
SKELETON = "torchelastic.skeleton"
OWN = "torchelastic.own"
#: The length of a skeleton is a multiple of this.
_GRAIN = 1024


@dataclass(frozen=True)
class Planned:
    """The part of one rank, without the elements of the tensors."""

    plan: SavePlan
    slots: Slots
    #: Size of the memory with these slots, and of the tensors alone.
    room: int
    bytes: int


@dataclass(frozen=True)
class Content(Planned):
    """The part of one rank, with its tensors."""

    #: By name, the local tensors: of a DTensor, its shard.
    tensors: Mapping[str, torch.Tensor]


class Planner:
    """Makes plans, and reuses the last one: from step to step only the elements change."""

    def __init__(self) -> None:
        self._form: tuple[Any, ...] = ()
        self._planned = Planned(SavePlan([]), {}, 0, 0)

    def content(self, shared: Any, own: Any = None, *, rank: int = 0, size: int = 1) -> Content:
        """Return this rank's part of `shared`, and all of its `own`."""
        skeleton, tensors = checkpoint_tree.flatten(shared, reserved=[SKELETON])
        tensors[SKELETON] = _as_tensor(skeleton)
        owned: dict[str, torch.Tensor] = {}
        if own is not None:
            prefix = f"{OWN}.{rank}"
            skeleton, owned = checkpoint_tree.flatten(own, prefix, reserved=[own_skeleton(rank)])
            owned[own_skeleton(rank)] = _as_tensor(skeleton)
        form = (rank, size, *map(_form, tensors.items()), *map(_form, owned.items()))
        if form != self._form:
            self._planned, self._form = _plan(tensors, owned, rank, size), form
        tensors |= owned
        local = {name: _local(tensors[name]) for name in self._planned.slots}
        return Content(**vars(self._planned), tensors=local)


def own_skeleton(rank: int) -> str:
    """The name of the skeleton of a rank's `own` data."""
    return f"{OWN}.{rank}.skeleton"


def _form(item: tuple[str, torch.Tensor]) -> tuple[Any, ...]:
    """The properties of a tensor that its plan depends on."""
    name, tensor = item
    if isinstance(tensor, DTensor):
        return name, torch_private.spec_of(tensor), torch_private.local_of(tensor).stride()
    return name, tensor.shape, tensor.dtype, tensor.stride()


def _plan(
    shared: dict[str, torch.Tensor], owned: dict[str, torch.Tensor], rank: int, size: int
) -> Planned:
    if size == 1:
        _refuse_shards(shared)
    mine = _share(shared, rank, size) | owned
    slots, room = layout({name: _memory(tensor) for name, tensor in mine.items()})
    plan = create_default_local_save_plan(mine, rank == 0)
    return Planned(plan, slots, room, sum(_memory(one).nbytes for one in mine.values()))


def _refuse_shards(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse DTensors if one rank saves alone: other ranks have the rest."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
            raise CheckpointError(
                f"'{name}' is sharded over ranks: call CheckpointStore.save(..., together=True) "
                "on all of them."
            )


def _as_tensor(skeleton: Any) -> torch.Tensor:
    """Encode a skeleton, padded so that its length, and the plan, rarely change."""
    text = json.dumps(skeleton).encode()
    room = -(-len(text) // _GRAIN) * _GRAIN
    return torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)


def from_tensor(skeleton: torch.Tensor) -> Any:
    return json.loads(skeleton.numpy().tobytes())


def _share(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    plain = {
        name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)
    }
    owners = owners_of(plain, size)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (_writes(tensor) if isinstance(tensor, DTensor) else owners[name] == rank)
    }


def owners_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the writing rank by name: largest first, each to the least loaded rank."""
    load = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least, rank = load[0]
        owners[name] = rank
        heapq.heapreplace(load, (least + sizes[name], rank))
    return owners


def _writes(tensor: DTensor) -> bool:
    """Return True if this rank writes its shard: the first of those that hold the same."""
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return False
    first = all(at[i] == 0 for i, place in enumerate(tensor.placements) if place.is_replicate())
    return first and (_memory(tensor).numel() > 0 or tensor.numel() == 0)


def by_address(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return tensors by their address; a DTensor by that of its shard."""
    return {_memory(tensor).data_ptr(): tensor for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local memory; resolves lazy conjugate and negative views."""
    memory = _memory(tensor).detach()
    return memory.resolve_conj().resolve_neg() if memory.is_conj() or memory.is_neg() else memory


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch_private.local_of(tensor) if isinstance(tensor, DTensor) else tensor
