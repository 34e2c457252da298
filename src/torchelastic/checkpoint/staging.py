"""Memory that a state is copied to at a step boundary, and written to storage from.

It is a memfd: another process can map it, and unlike /dev/shm, which is 64 MB in an ordinary pod,
its only limit is the memory there is. It is made once and kept: the next time its pages are there.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where a tensor is in the memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Slots = Mapping[str, Slot]


class Staging:
    """The writing side. Not for two threads at once."""

    def __init__(self) -> None:
        self.descriptor = -1
        #: Whether what was copied is still to be read.
        self.in_use = False
        self._memory: mmap.mmap | None = None

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Slots:
        """Copy all of them; the memory must not be in use."""
        slots, size = layout(tensors)
        memory = self._room(size)
        for name, tensor in tensors.items():
            view(memory, slots[name]).copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was begun must have arrived
        return slots

    def release(self) -> None:
        self.in_use = False

    def close(self) -> None:
        if self._memory is not None:
            _unpin(self._memory)
        self._memory = None  # unmapped once no tensor in it is left
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _room(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            self.close()
            self.descriptor = os.memfd_create("torchelastic-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, max(size, mmap.PAGESIZE))
            self._memory = _map(self.descriptor)
            _pin(self._memory)
        return self._memory


def staged(descriptor: int, slots: Slots) -> dict[str, torch.Tensor]:
    """The tensors as they were copied, in any process that has the descriptor."""
    memory = _map(descriptor)
    return {name: view(memory, slot) for name, slot in slots.items()}


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Slot], int]:
    slots, offset = {}, 0
    for name, tensor in tensors.items():
        slots[name] = Slot(offset, tuple(tensor.shape), tensor.dtype)
        length = tensor.numel() * tensor.element_size()
        offset += -(-length // _ALIGNMENT) * _ALIGNMENT
    return slots, offset


def view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    """A tensor in the memory, contiguous, with a storage of its own: torch.save writes that."""
    count = math.prod(slot.shape)
    if count == 0:
        return torch.empty(slot.shape, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
    return flat.view(slot.shape)


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _pin(memory: mmap.mmap) -> None:
    """Have CUDA copy into it without a detour. What it refuses is copied the slower way."""
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostRegister(_address(memory), len(memory), 0)


def _unpin(memory: mmap.mmap) -> None:
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(_address(memory))
