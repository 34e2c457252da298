"""A rank's piece of sharded tensors (`dtensors`).

Its skeleton has three lines: the number of the form of state, the skeleton of the local tensors
(`tensor_tree`), and the box of each in its whole tensor.

Optimizer state must be sharded like its parameter: after a restart nothing else tells how.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import torch_private
from torchelastic.errors import SnapshotError, TransferError
from torchelastic.snapshot.dtensors import Sharded, box_of, is_sharded, local_of
from torchelastic.snapshot.shard_boxes import Box, Index, Shape, Take, within
from torchelastic.snapshot.state_tree import Flat, Layout
from torchelastic.tensors import module_state, tensor_tree
from torchelastic.tensors.tensor_bytes import SMALL
from torchelastic.tensors.tensor_tree import Spec


class Shards:
    """The sharded tensors of some modules and optimizers, on this rank."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        parameters = [one for module in modules for one in module.parameters()]
        #: The same on all ranks.
        self.any = any(map(is_sharded, parameters))
        everything: list[Any] = [one for module in modules for one in module.modules()]
        self._resharding: list[Callable[[], None]] = [
            one.reshard for one in everything if self.any and hasattr(one, "reshard")
        ]
        #: The last flattened state, and the tensors it was made of.
        self._marks: list[tuple[int, int]] = []
        self._flat: Flat | None = None

    def reshard(self) -> None:
        """Reshard FSDP2 modules: a forward without a backward leaves them unsharded."""
        for reshard in self._resharding:
            reshard()

    # --- writing ---------------------------------------------------------------------------------

    def flatten(self, form: str, tensors: Sharded) -> Flat:
        """Flatten this rank's parts; again only if the tensors changed."""
        marks = [(id(one), torch_private.local_of(one).data_ptr()) for one in tensors.values()]
        if self._flat is None or marks != self._marks:
            self._marks, self._flat = marks, self._flatten(form, tensors)
        return self._flat

    def _flatten(self, form: str, tensors: Sharded) -> Flat:
        self._refuse_strays(tensors)
        local = {name: local_of(one) for name, one in tensors.items()}
        skeleton, flat = tensor_tree.flatten(local)
        boxes = json.dumps(index_to_json({name: box_of(one) for name, one in tensors.items()}))
        # A write through a DTensor moves its own count of writes, not that of the local tensor.
        watched = [one for name, one in tensors.items() if local[name].nbytes >= SMALL]
        return Flat("\n".join((form, skeleton, boxes)).encode(), flat, (), watched)

    def _refuse_strays(self, tensors: Sharded) -> None:
        """Refuse optimizer state sharded differently now, not when it is restored."""
        owners = self._owners()
        for name, tensor in tensors.items():
            owner = owners.get(_owner_of(name))
            if name.startswith("state/") and not _is_like(tensor, owner):
                raise TypeError(
                    f"Cannot snapshot the optimizer state {name}: it is sharded differently from "
                    "its parameter."
                )

    def _owners(self) -> dict[str, Any]:
        """Return the optimizers' parameters, by the prefix of their state's names."""
        return {
            f"state/{number}/{index}": parameter
            for number, optimizer in enumerate(self._optimizers)
            for index, parameter in enumerate(module_state.parameters_of(optimizer))
        }

    # --- restoring -------------------------------------------------------------------------------

    def made(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        """Create tensors for optimizer state that has a sharded parameter's shape."""
        owners = self._owners()
        found = {name: owners.get(_owner_of(name)) for name in shapes}
        return {
            name: _made(name, shapes[name], owner)
            for name, owner in found.items()
            if owner is not None and is_sharded(owner) and tuple(owner.shape) == shapes[name].size
        }

    def targets(self, shapes: Mapping[str, Shape], live: Sharded) -> dict[str, Any]:
        """Return the tensors to restore: existing ones, and new ones for optimizer state."""
        different = sorted(
            name for name in shapes.keys() ^ live.keys() if name.startswith("parameters/")
        )
        if different:
            raise SnapshotError(
                f"{different[0]} is sharded in only one of the snapshot and this script"
            )
        owners = self._owners()
        return {
            name: live[name]
            if name in live and _has_shape(live[name], shape)
            else _made(name, shape, owners.get(_owner_of(name)))
            for name, shape in shapes.items()
        }


def _owner_of(name: str) -> str:
    return "/".join(name.split("/", 3)[:3])


def _is_like(tensor: Any, owner: Any) -> bool:
    return (
        is_sharded(owner)
        and tensor.shape == owner.shape
        and tensor.placements == owner.placements
        and tensor.device_mesh == owner.device_mesh
    )


def _has_shape(tensor: Any, shape: Shape) -> bool:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Shape(dtype, tuple(tensor.shape)) == shape


def _made(name: str, shape: Shape, owner: Any) -> Any:
    """Create a DTensor for optimizer state, sharded like its parameter."""
    from torch.distributed.tensor import DTensor

    dtype = getattr(torch, shape.dtype, None)
    usable = is_sharded(owner) and tuple(owner.shape) == shape.size
    if not usable or not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"{name} in the snapshot does not match this script's parameters")
    local = torch.empty_like(local_of(owner), dtype=dtype)
    return DTensor.from_local(
        local,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )


@dataclass(frozen=True)
class Piece:
    """The shards that a rank of some world has written."""

    boxes: Index
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, form: str, skeleton: bytes, data: memoryview) -> Piece:
        """Read a piece; its tensors are views. `SnapshotError` if it is not of this state."""
        try:
            found, text, said = skeleton.decode().split("\n")
            boxes = index_from_json(json.loads(said))
            tensors = tensor_tree.restore(text, _views(tensor_tree.specs(text), data))
            fit = {name: tuple(one.shape) for name, one in tensors.items()}
        except (ValueError, TypeError, AttributeError, RuntimeError, TransferError) as error:
            raise SnapshotError(f"cannot read a piece of shards: {error}") from None
        if found != form or fit != {name: box.size for name, box in boxes.items()}:
            raise SnapshotError("a piece of shards belongs to a different state, or is invalid")
        return cls(boxes, tensors)


def _views(specs: Sequence[Spec], data: memoryview) -> list[torch.Tensor]:
    layout = Layout.of([spec.nbytes for spec in specs], [])
    if layout.size > len(data):
        raise ValueError("it is shorter than its skeleton says")
    whole = torch.empty(0, dtype=torch.uint8)
    if len(data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it must not be written, which nobody does
            whole = torch.frombuffer(data, dtype=torch.uint8)
    return [
        whole[at : at + spec.nbytes].view(spec.dtype).as_strided(spec.shape, spec.stride)
        for spec, at in zip(specs, layout.lasting, strict=True)
    ]


@torch.no_grad()
def copy(takes: Sequence[Take], pieces: Mapping[str, Piece], targets: Sharded) -> None:
    """Assemble this rank's parts."""
    needs = {name: box_of(one) for name, one in targets.items()}
    for take in takes:
        piece = pieces[take.piece]
        source = piece.tensors[take.name][within(piece.boxes[take.name], take.box)]
        local_of(targets[take.name])[within(needs[take.name], take.box)].copy_(source)


def index_to_json(index: Index) -> dict[str, Any]:
    return {name: [box.offset, box.size] for name, box in index.items()}


def index_from_json(said: Mapping[str, Any]) -> dict[str, Box]:
    return {name: Box(tuple(offset), tuple(size)) for name, (offset, size) in said.items()}
