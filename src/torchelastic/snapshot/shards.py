"""The sharded tensors of a state (`dtensors`), and a rank's piece of them.

A tensor's name is its place in the state: `parameters/0/layer.weight`, `state/0/3/exp_avg`.

The skeleton of a piece has three lines: the number of the form of state, the skeleton of the local
tensors (`tensor_tree`), and the part that each is of its whole tensor.

Optimizer state must be sharded like its parameter, or replicated on its mesh if the shape differs:
after a restart nothing else tells how.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import torch_private
from torchelastic.errors import SnapshotError, TransferError
from torchelastic.tensors import module_state, tensor_tree
from torchelastic.tensors.dtensors import is_sharded, local_of, region_of, shard_like
from torchelastic.tensors.shard_layout import Box, Index, Region, Take, TensorShape
from torchelastic.tensors.tensor_bytes import SMALL, Flat, Layout
from torchelastic.tensors.tensor_tree import Spec

#: DTensors by name. (The type is not named here: importing it takes a second.)
Sharded = Mapping[str, Any]


def is_plain(value: object) -> bool:
    """Return whether its elements alone define the tensor, sharded or not."""
    if is_sharded(value):
        return True
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and not value.is_quantized


def take_out(
    lasting: Mapping[str, Any], which: Callable[[object], bool] = is_sharded
) -> dict[str, Any]:
    """Remove the DTensors from this tree of parameters and optimizer state, leaving None."""
    found = {}
    for name, entries, key in _slots(lasting):
        value = entries[key]
        if which(value):
            if is_sharded(value):
                region_of(name, value)  # refuses placements that cannot be kept
            found[name] = value
            entries[key] = None
    return found


def put_in(lasting: Mapping[str, Any], tensors: Sharded) -> None:
    """Reverse `take_out`."""
    for name, entries, key in _slots(lasting):
        if name in tensors:
            entries[key] = tensors[name]


def _slots(lasting: Mapping[str, Any]) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield every place for a tensor: its name, and the dict and key that lead there."""
    for number, parameters in enumerate(lasting["parameters"]):
        for key in parameters:
            yield f"parameters/{number}/{key}", parameters, key
    for number, state in enumerate(lasting["state"]):
        for parameter, entries in state.items():
            for key in entries:
                yield f"state/{number}/{parameter}/{key}", entries, key


def shape_of(size: Sequence[int], dtype: torch.dtype) -> TensorShape:
    return TensorShape(str(dtype).removeprefix("torch."), tuple(size))


def shapes_of(tensors: Sharded) -> dict[str, Any]:
    """Return the shapes of sharded tensors, which the shared piece records."""
    return {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
        for name, one in tensors.items()
    }


def read_shapes(said: Mapping[str, Any]) -> dict[str, TensorShape]:
    return {name: TensorShape(dtype, tuple(size)) for name, (dtype, size) in said.items()}


def index_of(tensors: Sharded) -> dict[str, Region]:
    """Return the part of each DTensor that this rank holds."""
    return {name: region_of(name, one) for name, one in tensors.items()}


# --- the shards of a state ------------------------------------------------------------------------


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
        self._tensors: Sharded | None = None
        self._marks: list[tuple[int, int]] = []
        self._flat: Flat | None = None

    def reshard(self) -> None:
        """Reshard FSDP2 modules: a forward without a backward leaves them unsharded."""
        for reshard in self._resharding:
            reshard()

    # --- writing ---------------------------------------------------------------------------------

    def flatten(self, form: str, tensors: Sharded) -> Flat:
        """Flatten this rank's parts; again only if the tensors changed."""
        if self._flat is not None and tensors is self._tensors:
            return self._flat
        self._tensors = tensors
        marks = [(id(one), torch_private.local_of(one).data_ptr()) for one in tensors.values()]
        if self._flat is None or marks != self._marks:
            self._marks, self._flat = marks, self._flatten(form, tensors)
        return self._flat

    def _flatten(self, form: str, tensors: Sharded) -> Flat:
        self._refuse_strays(tensors)
        local = {name: local_of(one) for name, one in tensors.items()}
        skeleton, flat = tensor_tree.flatten(local)
        parts = json.dumps(index_to_json(index_of(tensors)))
        # A write through a DTensor moves its own count of writes, not that of the local tensor.
        watched = [one for name, one in tensors.items() if local[name].nbytes >= SMALL]
        return Flat("\n".join((form, skeleton, parts)).encode(), flat, (), watched)

    def _refuse_strays(self, tensors: Sharded) -> None:
        """Refuse optimizer state sharded differently now, not when it is restored."""
        owners = self._owners()
        for name, tensor in tensors.items():
            owner = owners.get(_owner_of(name))
            if name.startswith("state/") and not _is_like(tensor, owner):
                raise TypeError(
                    f"Cannot snapshot the optimizer state {name}: it is sharded differently from "
                    "its parameter. Fix: shard it like the parameter, or replicate it on its mesh."
                )

    def _owners(self) -> dict[str, Any]:
        """Return the optimizers' parameters, by the prefix of their state's names."""
        return {
            f"state/{number}/{index}": parameter
            for number, optimizer in enumerate(self._optimizers)
            for index, parameter in enumerate(module_state.parameters_of(optimizer))
        }

    # --- restoring -------------------------------------------------------------------------------

    def made(self, shapes: Mapping[str, TensorShape]) -> dict[str, Any]:
        """Create tensors for optimizer state that has a sharded parameter's shape."""
        owners = self._owners()
        found = {name: owners.get(_owner_of(name)) for name in shapes}
        return {
            name: _made(name, shapes[name], owner)
            for name, owner in found.items()
            if owner is not None and is_sharded(owner) and tuple(owner.shape) == shapes[name].size
        }

    def targets(self, shapes: Mapping[str, TensorShape], live: Sharded) -> dict[str, Any]:
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
            if name in live and shape_of(live[name].shape, live[name].dtype) == shape
            else _made(name, shape, owners.get(_owner_of(name)))
            for name, shape in shapes.items()
        }


def _owner_of(name: str) -> str:
    return "/".join(name.split("/", 3)[:3])


def _is_like(tensor: Any, owner: Any) -> bool:
    if not is_sharded(owner) or tensor.device_mesh != owner.device_mesh:
        return False
    if tensor.shape == owner.shape:
        return bool(tensor.placements == owner.placements)
    return all(placement.is_replicate() for placement in tensor.placements)


def _made(name: str, shape: TensorShape, owner: Any) -> Any:
    """Create a DTensor for optimizer state, as `_is_like` wants it."""
    from torch.distributed.tensor import DTensor, Replicate

    dtype = getattr(torch, shape.dtype, None)
    if not is_sharded(owner) or not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"{name} in the snapshot does not match this script's parameters")
    mesh = owner.device_mesh
    if tuple(owner.shape) != shape.size:
        whole = torch.empty(shape.size, dtype=dtype, device=local_of(owner).device)
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return shard_like(owner, torch.empty_like(local_of(owner), dtype=dtype))


@dataclass(frozen=True)
class Piece:
    """The shards that a rank of some world has written."""

    index: Index
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, form: str, skeleton: bytes, data: memoryview) -> Piece:
        """Read a piece; its tensors are views. `SnapshotError` if it is not of this state."""
        try:
            found, text, said = skeleton.decode().split("\n")
            index = index_from_json(json.loads(said))
            tensors = tensor_tree.restore(text, _views(tensor_tree.specs(text), data))
            fit = {name: tuple(one.shape) for name, one in tensors.items()}
        except (
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            RuntimeError,
            TransferError,
        ) as error:
            raise SnapshotError(f"cannot read a piece of shards: {error}") from None
        if found != form or fit != {name: part.shape for name, part in index.items()}:
            raise SnapshotError("a piece of shards belongs to a different state, or is invalid")
        return cls(index, tensors)


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
def assemble(takes: Sequence[Take], pieces: Mapping[str, Piece], targets: Sharded) -> None:
    """Assemble this rank's parts."""
    for take in takes:
        source = pieces[take.piece].tensors[take.name][_slices(take.source, take.box)]
        local_of(targets[take.name])[_slices(take.target, take.box)].copy_(source)


def _slices(begin: Sequence[int], box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(begin, box.size, strict=True))


def index_to_json(index: Index) -> dict[str, Any]:
    return {name: _region_to_json(part) for name, part in index.items()}


def index_from_json(said: Mapping[str, Any]) -> dict[str, Region]:
    return {name: _region_from_json(part) for name, part in said.items()}


def _region_to_json(part: Region) -> Any:
    """Return offset and size if it is one box; otherwise the ranges of each dimension.

    >>> _region_to_json(Region((((4, 2),), ((0, 3),))))
    [[4, 0], [2, 3]]
    """
    if all(len(ranges) <= 1 for ranges in part.ranges):
        box = [ranges[0] if ranges else (0, 0) for ranges in part.ranges]
        return [[begin for begin, _ in box], [length for _, length in box]]
    return {"ranges": part.ranges}


def _region_from_json(said: Any) -> Region:
    if isinstance(said, dict):
        return Region(tuple(tuple((low, n) for low, n in ranges) for ranges in said["ranges"]))
    box = zip(*said, strict=True)
    return Region(tuple(((low, n),) if n else () for low, n in box))
