"""DTensors, as `fully_shard` and tensor parallelism make them, and this rank's part of one.

(Types of `torch.distributed.tensor` are not named here: importing it takes a second.)
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchelastic import torch_private
from torchelastic.tensors.shard_layout import Region, Split, region


def kind() -> tuple[type[Any], ...]:
    """Return the type of DTensors. If the module was never imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def is_sharded(value: object) -> bool:
    """Return whether it is a DTensor."""
    return isinstance(value, kind())


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part: the memory itself."""
    return torch_private.local_of(tensor).detach()


def local_or_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return local_of(tensor) if is_sharded(tensor) else tensor


def shard_like(template: Any, part: torch.Tensor) -> Any:
    """Return a DTensor with this part, sharded as the template is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def zeros_like(tensor: torch.Tensor) -> Any:
    """Return zeros of the same kind. (The first `torch.zeros_like` of a DTensor of any shape takes
    milliseconds: torch derives the placement.)"""
    zeros = torch.zeros_like(local_or_whole(tensor))
    return shard_like(tensor, zeros) if is_sharded(tensor) else zeros


def region_of(name: str, tensor: Any) -> Region:
    """Return the part of a DTensor that this rank holds: nothing outside of its mesh.

    `TypeError` if its placements do not tell.
    """
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return Region(((),) * tensor.ndim)
    found = region(tensor.shape, _splits(name, tensor, at))
    if found.shape != (shape := tuple(local_of(tensor).shape)):
        raise TypeError(
            f"Cannot snapshot the DTensor {name}: this rank holds a shard of shape {shape}, and "
            f"{tensor.placements} of shape {tuple(tensor.shape)} means {found.shape}. Fix: make "
            "the dimension divisible by the mesh."
        )
    return found


def _splits(name: str, tensor: Any, at: list[int]) -> list[Split]:
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for number, placement in enumerate(tensor.placements):
        if type(placement) in (Shard, torch_private.strided_shard()):
            factor = getattr(placement, "split_factor", 1)
            dim, parts = placement.dim % tensor.ndim, tensor.device_mesh.size(number)
            found.append(Split(dim, parts, at[number], factor))
        elif type(placement) is not Replicate:
            raise TypeError(
                f"Cannot snapshot the DTensor {name}: with placement {type(placement).__name__}, "
                "no rank holds its values. Fix: redistribute it to Shard or Replicate first."
            )
    return found
