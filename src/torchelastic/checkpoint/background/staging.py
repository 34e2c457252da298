"""The memory that a state is copied to at a step boundary and written to storage from.

It is a memfd: another process can map it, and unlike /dev/shm, which has 64 MB in an ordinary pod,
it is limited only by the available memory. It is allocated once and reused.

Small tensors are copied at once. The rest is a `Copying`: a thread of the store runs it, and any
thread that waits for it helps. So tensors that only optimizers change are copied during the next
forward and backward, and `optimizer.step` waits for the rest.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic import torch_private
from torchelastic.errors import CheckpointError
from torchelastic.system import memory_limit
from torchelastic.tensors import tensor_bytes
from torchelastic.tensors.tensor_bytes import SMALL
from torchelastic.torch_private import version_of

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """The location of a tensor in the memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


Slots = Mapping[str, Slot]


class Copying:
    """A copy in progress: each thread that runs it takes pieces of the work until none is left."""

    def __init__(
        self,
        pieces: Iterable[Callable[[], object]] = (),
        *,
        watched: Sequence[torch.Tensor] = (),
        kept: object = None,
    ) -> None:
        """`watched` must not change until it is done; `kept` is referenced by the pieces."""
        self._pieces, self._kept = deque(pieces), kept
        self._left = len(self._pieces)
        self._watched = [(tensor, version_of(tensor)) for tensor in watched]
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        #: One of the tensors changed meanwhile: the copy is worthless.
        self.is_disturbed = False
        if not self._left:
            self._end()

    def run(self) -> None:
        """Copy, together with other threads that run it; return when all is copied."""
        while (piece := self._next()) is not None:
            try:
                piece()
            except Exception as error:  # of a device; `result` raises it, not a helping thread
                self._error = error
            if self._was_last():
                self._end()
        self._done.wait()

    def result(self) -> None:
        """`run`, then raise if the copy failed."""
        self.run()
        if self._error is not None:
            raise CheckpointError(f"could not copy the state ({self._error!r})")
        if self.is_disturbed:
            raise CheckpointError(
                "parameters or optimizer state changed before optimizer.step while they were being "
                "copied; from now on training waits for the copy"
            )

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            return self._pieces.popleft() if self._pieces else None

    def _was_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0

    def _end(self) -> None:
        """Check the watched tensors before waiting threads continue and change them."""
        self.is_disturbed = any(version_of(tensor) != count for tensor, count in self._watched)
        self._watched, self._kept = [], None
        self._done.set()


class Staging:
    """The writing side. Not for two threads at once."""

    def __init__(self) -> None:
        self.descriptor = -1
        #: The copy is still being read.
        self.in_use = False
        self._memory: mmap.mmap | None = None
        #: Views for the small tensors, made for these slots.
        self._views: list[torch.Tensor] = []
        self._slots: Slots | None = None

    def copy(
        self,
        tensors: Mapping[str, torch.Tensor],
        slots: Slots,
        size: int,
        lasting: Mapping[int, torch.Tensor] | None = None,
    ) -> Copying:
        """Start to copy all tensors to their slots; the memory must not be in use.

        With `lasting`, tensors at its addresses are copied later and watched for changes; all
        others are copied when this returns.
        """
        memory = self._room(size)
        begin = _address(memory)
        small = {name: one for name, one in tensors.items() if one.nbytes < SMALL}
        later = {name: one for name, one in tensors.items() if one.nbytes >= SMALL}
        self._copy_small(memory, slots, small)
        if lasting is not None:
            for name in [name for name, one in later.items() if one.data_ptr() not in lasting]:
                tensor_bytes.copy_out(later.pop(name), begin + slots[name].offset)
        pieces = [
            piece
            for name, tensor in later.items()
            for piece in tensor_bytes.in_pieces(tensor, begin + slots[name].offset)
        ]
        watched = [lasting[one.data_ptr()] for one in later.values()] if lasting else []
        return Copying(pieces, watched=watched, kept=(memory, later))

    def release(self) -> None:
        self.in_use = False

    def close(self) -> None:
        self._views, self._slots = [], None
        if self._memory is not None:
            _unpin(self._memory)
        self._memory = None  # unmapped once no tensor in it is left
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _room(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            self.close()
            # Without this check the kernel would kill the process that writes to it.
            memory_limit.check(
                size, "copies to write checkpoints from", "let training wait for them"
            )
            self.descriptor = os.memfd_create("torchelastic-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, max(size, mmap.PAGESIZE))
            self._memory = _map(self.descriptor)
            _pin(self._memory)
        return self._memory

    @torch.no_grad()
    def _copy_small(
        self, memory: mmap.mmap, slots: Slots, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        if slots is not self._slots:  # else nothing has changed but the numbers
            self._views, self._slots = [view(memory, slots[name]) for name in tensors], slots
        if self._views:
            torch_private.copy_all(self._views, list(tensors.values()), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was begun must have arrived


def staged(descriptor: int, slots: Slots) -> dict[str, torch.Tensor]:
    """Return the copied tensors, in any process that has the descriptor."""
    memory = _map(descriptor)
    return {name: view(memory, slot) for name, slot in slots.items()}


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Slots, int]:
    """Return the slot of each tensor, and the size of the memory."""
    slots, offset = {}, 0
    for name, tensor in tensors.items():
        stride = tensor_bytes.stride_of(tensor)
        slots[name] = Slot(offset, tuple(tensor.shape), stride, tensor.dtype)
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots, offset


def view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    """Return a tensor in the memory with its own storage, which torch.save writes."""
    count = math.prod(slot.shape)
    if count == 0:
        return torch.empty(slot.shape, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
    return flat.as_strided(slot.shape, slot.stride)


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _pin(memory: mmap.mmap) -> None:
    """Pin the memory for fast copies from CUDA. If CUDA refuses, copies are slower."""
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostRegister(_address(memory), len(memory), 0)


def _unpin(memory: mmap.mmap) -> None:
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(_address(memory))
