"""DTensors in a state, as FSDP2's `fully_shard` makes them: each rank holds a part of the tensor.

A tensor's name is its place in the state: `parameters/0/layer.weight`, `state/0/3/exp_avg`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchelastic import torch_private
from torchelastic.snapshot.shard_boxes import Box, Shape

#: DTensors by name. (The type is not named here: importing it takes a second.)
Sharded = Mapping[str, Any]


def is_sharded(value: object) -> bool:
    """Return whether it is a DTensor. If the module was never imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
            _refuse_placements(name, value)
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


#: Advice for placements that cannot be snapshotted.
_ADVICE = {
    "_StridedShard": "FSDP2 and tensor parallelism split the same dimension; let them split "
    "different dimensions, or use only one of them",
    "Partial": "redistribute it to Shard or Replicate first",
}


def _refuse_placements(name: str, tensor: Any) -> None:
    """Refuse placements of which a rank may not hold one box: partial sums, and the strided shards
    of FSDP2 on top of tensor parallelism in the same dimension."""
    if not is_sharded(tensor):
        return
    from torch.distributed.tensor import Replicate, Shard

    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            kind = type(placement).__name__
            raise TypeError(
                f"Cannot snapshot the DTensor {name}: with placement {kind}, a rank may not hold "
                f"one contiguous block. Fix: {_ADVICE.get(kind, 'use Shard or Replicate')}."
            )


def shape_of(size: Sequence[int], dtype: torch.dtype) -> Shape:
    return Shape(str(dtype).removeprefix("torch."), tuple(size))


def shapes_of(tensors: Sharded) -> dict[str, Any]:
    """Return the shapes of sharded tensors, which the shared piece records."""
    return {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
        for name, one in tensors.items()
    }


def read_shapes(said: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: Shape(dtype, tuple(size)) for name, (dtype, size) in said.items()}


def box_of(tensor: Any) -> Box:
    """Return the box of a DTensor that this rank holds."""
    offset, size = torch_private.box_of(tensor)
    return Box(tuple(offset), tuple(size))


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part: the memory itself."""
    return torch_private.local_of(tensor).detach()
