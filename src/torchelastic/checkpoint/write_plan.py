"""Who writes what of a state, and under which names: a plan of torch.distributed.checkpoint.

A tree is the same on all ranks but for its DTensors, of which each has its shards. What all have is
written by one of them: who is settled by names and sizes alone, so that nobody has to ask. What
differs from rank to rank is `own`, and each writes it under its rank.
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

#: Names that are ours among those of tensors: the skeletons, as bytes.
SKELETON = "torchelastic.skeleton"
OWN = "torchelastic.own"
#: The length of a skeleton is a multiple of this.
_GRAIN = 1024


@dataclass(frozen=True)
class Planned:
    """What one rank writes, but for the elements of the tensors."""

    plan: SavePlan
    slots: Slots
    #: Of the memory that has these slots, and of the tensors.
    room: int
    bytes: int


@dataclass(frozen=True)
class Content(Planned):
    """What one rank writes."""

    #: By name, the tensors as they are in this process: a DTensor's shard.
    tensors: Mapping[str, torch.Tensor]


class Planner:
    """Makes plans, and the same plan once: step after step only the elements change."""

    def __init__(self) -> None:
        self._form: tuple[Any, ...] = ()
        self._planned = Planned(SavePlan([]), {}, 0, 0)

    def content(self, shared: Any, own: Any = None, *, rank: int = 0, size: int = 1) -> Content:
        """The part of `shared` that falls to this rank, and all of its `own`."""
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
    """The name of the skeleton of what is a rank's own."""
    return f"{OWN}.{rank}.skeleton"


def _form(item: tuple[str, torch.Tensor]) -> tuple[Any, ...]:
    """By which a tensor is known to be planned for already."""
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
    """Other ranks have the rest of them, and would not be asked for it."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
            raise CheckpointError(
                f"'{name}' is sharded over ranks: call CheckpointStore.save(..., together=True) "
                "on all of them."
            )


def _as_tensor(skeleton: Any) -> torch.Tensor:
    """With spaces at the end, so that it stays as long when numbers grow, and plans hold."""
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
    """By name, the rank that writes it: the largest first, each to whoever has least so far."""
    load = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least, rank = load[0]
        owners[name] = rank
        heapq.heapreplace(load, (least + sizes[name], rank))
    return owners


def _writes(tensor: DTensor) -> bool:
    """Whether this rank writes its shard: the first of those that hold the same, if not empty."""
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return False
    first = all(at[i] == 0 for i, place in enumerate(tensor.placements) if place.is_replicate())
    return first and (_memory(tensor).numel() > 0 or tensor.numel() == 0)


def by_address(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Tensors by where they lie in this process; a DTensor by where its shard does."""
    return {_memory(tensor).data_ptr(): tensor for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """As it lies in memory; there, views that conjugate or negate look like any other."""
    memory = _memory(tensor).detach()
    return memory.resolve_conj().resolve_neg() if memory.is_conj() or memory.is_neg() else memory


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch_private.local_of(tensor) if isinstance(tensor, DTensor) else tensor
