"""The content of a checkpoint: a tree as named tensors and a skeleton, and who writes what of it.

Tensors go to torch.distributed.checkpoint under dotted names (`model.fc.weight`), so that its own
tools find them. Everything else is the *skeleton*: JSON, so that loading it runs no code. (State
that is sent to other ranks or kept in memory is written by `tensors.tensor_tree`: it keeps every
bit, and each tensor once.)

A tree is the same on all ranks except for its DTensors, of which each rank has its shards. A tensor
that all ranks have is written by one of them, chosen by names and sizes alone, so that ranks need
not communicate. Data that differs between ranks is `own`, and each rank writes it under its rank.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from torchelastic import torch_private
from torchelastic.checkpoint.staging import Slots, layout
from torchelastic.errors import CheckpointError
from torchelastic.tensors.dtensors import local_or_whole, region_of
from torchelastic.tensors.shard_layout import Region
from torchelastic.tensors.tensor_bytes import bytes_of

#: Reserved tensor names: the skeletons of trees, as bytes.
SKELETON = "torchelastic.skeleton"
OWN = "torchelastic.own"
#: The length of a skeleton is a multiple of this.
_GRAIN = 1024
#: The key of values that JSON cannot express.
_KIND = "!"


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
        skeleton, tensors = flatten(shared, reserved=[SKELETON])
        tensors[SKELETON] = _as_tensor(skeleton)
        owned: dict[str, torch.Tensor] = {}
        if own is not None:
            prefix = f"{OWN}.{rank}"
            skeleton, owned = flatten(own, prefix, reserved=[own_skeleton(rank)])
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
    slots, room = layout({name: local_or_whole(tensor) for name, tensor in mine.items()})
    plain = {name: one for name, one in mine.items() if not isinstance(one, DTensor)}
    items = list(create_default_local_save_plan(plain, rank == 0).items)
    for name, tensor in mine.items():
        if isinstance(tensor, DTensor):
            items += _shard_items(name, tensor)
    plan = SavePlan(items)
    return Planned(plan, slots, room, sum(local_or_whole(one).nbytes for one in mine.values()))


def _shard_items(name: str, tensor: DTensor) -> list[WriteItem]:
    """Plan this rank's part of a DTensor, box by box. (torch's own planner writes one box, and for
    strided shards of unequal size a wrong one.)"""
    local = local_or_whole(tensor)
    properties = TensorProperties.create_from_tensor(local)
    empty = [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), local.shape)]
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.size()),
        )
        for chunk in chunks(region_of(name, tensor)) or empty
    ]


def chunks(part: Region) -> list[ChunkStorageMetadata]:
    """Return the boxes of a part, as torch calls them."""
    return [
        ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
        for box, _ in part.boxes()
    ]


def at_offset(part: Region, local: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Return the box of a rank's local tensor that begins at this offset in the whole tensor."""
    box, at = next(one for one in part.boxes() if one[0].offset == tuple(offset))
    ends = zip(at, box.size, strict=True)
    return local[tuple(slice(begin, begin + length) for begin, length in ends)]


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
    return json.loads(bytes_of(skeleton))


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
    return first and (local_or_whole(tensor).numel() > 0 or tensor.numel() == 0)


def by_address(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return tensors by their address; a DTensor by that of its shard."""
    return {local_or_whole(tensor).data_ptr(): tensor for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local memory; resolves lazy conjugate and negative views."""
    memory = local_or_whole(tensor).detach()
    return memory.resolve_conj().resolve_neg() if memory.is_conj() or memory.is_neg() else memory


# --- a tree as tensors and a skeleton -------------------------------------------------------------


def flatten(
    tree: Any, prefix: str = "", *, reserved: Collection[str] = ()
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the skeleton, and the tensors by name; no name is `reserved`.

    A tensor that occurs twice is stored twice.
    """
    tensors = dict.fromkeys(reserved, torch.empty(0))
    skeleton = _take_apart(tree, prefix, tensors)
    return skeleton, {name: one for name, one in tensors.items() if name not in reserved}


def restore(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree; a tensor missing in `tensors` is an error."""
    if isinstance(skeleton, list):
        return [restore(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _KIND not in skeleton:
        return {key: restore(item, tensors) for key, item in skeleton.items()}
    return _KINDS[skeleton[_KIND]](skeleton, tensors)


def _take_apart(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        name = _free(path, tensors)
        tensors[name] = node
        return {_KIND: "tensor", "name": name}
    if isinstance(node, Mapping):
        return _mapping(node, path, tensors)
    if isinstance(node, list | tuple):
        items = [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(node)]
        return {_KIND: "tuple", "items": items} if isinstance(node, tuple) else items
    return _value(node, path)


def _mapping(node: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if _KIND not in node and all(type(key) is str for key in node):
        return {key: _take_apart(v, _join(path, key), tensors) for key, v in node.items()}
    items = [
        [_value(key, path), _take_apart(v, _join(path, key), tensors)] for key, v in node.items()
    ]
    return {_KIND: "dict", "items": items}


def _value(node: Any, path: str) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(node).decode()}
    if isinstance(node, torch.dtype):
        return {_KIND: "dtype", "name": str(node).removeprefix("torch.")}
    raise CheckpointError(
        f"A checkpoint cannot hold '{path}', a {type(node).__qualname__}: use tensors, numbers, "
        "strings, bytes, None, and lists, tuples and dicts of these."
    )


def _free(path: str, taken: Mapping[str, Any]) -> str:
    """Return a unique path: numbered if taken, as for 1 and "1", or "a.b" and b within a."""
    numbered = (f"{path}#{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if name not in taken)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _dtype(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    found = getattr(torch, node["name"], None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"This version of torch does not know the dtype '{node['name']}'.")
    return found


_KINDS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda node, tensors: tensors[node["name"]],
    "tuple": lambda node, tensors: tuple(restore(node["items"], tensors)),
    "dict": lambda node, tensors: {
        restore(key, tensors): restore(item, tensors) for key, item in node["items"]
    },
    "bytes": lambda node, tensors: base64.b64decode(node["base64"]),
    "dtype": _dtype,
}
