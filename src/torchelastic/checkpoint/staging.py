"""The memory that a state is copied to at a step boundary and written to storage from.

It is a memfd: another process can map it, and unlike /dev/shm, which has 64 MB in an ordinary pod,
it is limited only by the available memory. It is allocated once and reused.

Small tensors are copied at once, the rest behind the training (`tensors.tensor_bytes`).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic.system import memory_limit, shared_memory
from torchelastic.tensors.tensor_bytes import (
    SMALL,
    BackgroundCopy,
    SmallCopies,
    copy_out,
    end_to_end,
    stride_of,
)


@dataclass(frozen=True)
class Slot:
    """The location of a tensor in the memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


Slots = Mapping[str, Slot]


class Staging:
    """The writing side. Not for two threads at once."""

    def __init__(self) -> None:
        self.descriptor = -1
        #: The copy is still being read.
        self.in_use = False
        self._memory: mmap.mmap | None = None
        #: The memory as a tensor.
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._small = SmallCopies()

    def copy(
        self,
        tensors: Mapping[str, torch.Tensor],
        slots: Slots,
        size: int,
        lasting: Mapping[int, torch.Tensor] | None = None,
    ) -> BackgroundCopy:
        """Start to copy all tensors to their slots; the memory must not be in use.

        With `lasting`, tensors at its addresses are copied later and watched for changes; all
        others are copied when this returns.
        """
        memory = self._room(size)
        small = {name: one for name, one in tensors.items() if one.nbytes < SMALL}
        later = {name: one for name, one in tensors.items() if one.nbytes >= SMALL}
        self._small.copy([*small.values()], [slots[name].offset for name in small], memory)
        if lasting is not None:
            for name in [name for name, one in later.items() if one.data_ptr() not in lasting]:
                copy_out(later.pop(name), memory.data_ptr() + slots[name].offset)
        offsets = [slots[name].offset for name in later]
        watched = [lasting[one.data_ptr()] for one in later.values()] if lasting else []
        return BackgroundCopy([*later.values()], offsets, memory.data_ptr, watched=watched)

    def release(self) -> None:
        self.in_use = False

    def close(self) -> None:
        if self._memory is not None:
            _unpin(self._bytes)
        # Unmapped once no tensor in it is left.
        self._memory, self._small = None, SmallCopies()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _room(self, size: int) -> torch.Tensor:
        if self._memory is None or len(self._memory) < size:
            self.close()
            # Without this check the kernel would kill the process that writes to it.
            memory_limit.check(
                size, "copies to write checkpoints from", "let training wait for them"
            )
            self.descriptor = shared_memory.create("checkpoint", max(size, shared_memory.PAGE))
            self._memory = shared_memory.map_memory(self.descriptor)
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            _pin(self._bytes)
        return self._bytes


def staged(descriptor: int, slots: Slots) -> dict[str, torch.Tensor]:
    """Return the copied tensors, in any process that has the descriptor."""
    memory = shared_memory.map_memory(descriptor)
    return {name: view(memory, slot) for name, slot in slots.items()}


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Slots, int]:
    """Return the slot of each tensor, and the size of the memory."""
    offsets, size = end_to_end([one.nbytes for one in tensors.values()])
    slots = {
        name: Slot(offset, tuple(one.shape), stride_of(one), one.dtype)
        for (name, one), offset in zip(tensors.items(), offsets, strict=True)
    }
    return slots, size


def view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    """Return a tensor in the memory with its own storage, which torch.save writes."""
    count = math.prod(slot.shape)
    if count == 0:
        return torch.empty(slot.shape, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
    return flat.as_strided(slot.shape, slot.stride)


def _pin(memory: torch.Tensor) -> None:
    """Pin the memory for fast copies from CUDA. If CUDA refuses, copies are slower."""
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostRegister(memory.data_ptr(), len(memory), 0)


def _unpin(memory: torch.Tensor) -> None:
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(memory.data_ptr())
