"""The elements of tensors as bytes: their addresses, their places in a copy of a state, and copies
made while training continues.

A tensor without gaps is one run of bytes, channels-last or not: its elements are taken in memory
order. Those of one with gaps are taken in the order of its dimensions.

Snapshots and checkpoints copy a state in the same way. `end_to_end` gives every tensor its place.
Small tensors are copied at once (`SmallCopies`). The large ones that only optimizers change are a
`BackgroundCopy`: a thread runs it during the next forward and backward. `optimizer.step` runs it,
too: it helps, and continues when all is copied.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchelastic import torch_private
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.torch_private import version_of

#: Tensors below this many bytes are small: copying one is cheaper than watching it for writes.
SMALL = 64 << 10
#: Bytes copied at a time where several threads share the work.
PIECE = 4 << 20
#: The alignment of tensors in a copy.
ALIGNMENT = 64


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements fill its memory without gaps, in any order of dimensions."""
    return tensor.is_contiguous() or _in_memory_order(tensor).is_contiguous()


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride of its elements in its bytes."""
    return tuple(tensor.stride()) if is_dense(tensor) else _contiguous(tensor.shape)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the outermost dimension first: contiguous also for channels-last."""
    stride, shape = tensor.stride(), tensor.shape
    order = sorted(range(len(shape)), key=lambda i: (stride[i], shape[i]), reverse=True)
    return tensor.detach().permute(order)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a contiguous CPU tensor's bytes. (`numpy()` is slower, and may be missing.)"""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def sha256_of(tree: Any) -> str:
    """Hash all tensors in dicts and lists, by the paths to them, whatever their order; of a DTensor
    this rank's part."""
    found = hashlib.sha256()
    for name, tensor in sorted(_named(tree), key=lambda item: item[0]):
        found.update(name.encode())
        content = local_or_whole(tensor.detach()).cpu().contiguous()
        found.update((ctypes.c_char * content.nbytes).from_address(content.data_ptr()))
    return found.hexdigest()


def crc32_of(tree: Any) -> int:
    """Checksum all tensors in dicts and lists with the paths to them: fast, and it depends on the
    places of the bits. The GIL is free meanwhile."""
    found = 0
    for name, tensor in sorted(_named(tree), key=lambda item: item[0]):
        content = tensor.detach().cpu().contiguous()
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32((ctypes.c_char * content.nbytes).from_address(content.data_ptr()), found)
    return found


def _named(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, one in items:
            yield from _named(one, f"{path}.{key}" if path else str(key))


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return its elements as bytes; the memory itself if it has no gaps."""
    dense = _in_memory_order(tensor) if is_dense(tensor) else tensor.detach().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def address_of(data: memoryview) -> int:
    """Return the address of bytes. Hold the view as long as the address is used."""
    if not len(data):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only: nothing here writes to it
        return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


@torch.no_grad()
def copy_out(tensor: torch.Tensor, address: int) -> None:
    """Copy the tensor's elements to memory, in one thread and without the GIL.

    (`Tensor.copy_` would use the threads of the training.)
    """
    if _is_at_hand(tensor):
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
    elif tensor.nbytes:
        _bytes_at(address, tensor.nbytes).copy_(elements_of(tensor))


def in_pieces(tensor: torch.Tensor, address: int) -> Iterator[Callable[[], object]]:
    """Return `copy_out` as several calls for several threads; hold the tensor meanwhile."""
    if not _is_at_hand(tensor):
        yield partial(copy_out, tensor, address)
        return
    begin, size = tensor.data_ptr(), tensor.nbytes
    for at in range(0, size, PIECE):
        yield partial(ctypes.memmove, address + at, begin + at, min(PIECE, size - at))


@torch.no_grad()
def copy_in(tensor: torch.Tensor, address: int) -> None:
    """Copy elements from memory into a tensor without gaps."""
    if tensor.device.type == "cpu":
        ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
    elif tensor.nbytes:
        elements_of(tensor).copy_(_bytes_at(address, tensor.nbytes))


def _is_at_hand(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_dense(tensor)


def _bytes_at(address: int, count: int) -> torch.Tensor:
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


# --- the places of tensors in a copy --------------------------------------------------------------


def end_to_end(sizes: Sequence[int], at: int = 0) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes from `at` on, and the end.

    >>> end_to_end([100, 0, 1])
    ([0, 128, 128], 192)
    """
    offsets = []
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


@dataclass(frozen=True)
class Flat:
    """A state to copy. Its tensors are the state's own memory wherever possible.

    The *lasting* ones are what only `optimizer.step` writes, the *passing* ones all others.
    """

    skeleton: bytes
    lasting: Sequence[torch.Tensor]
    passing: Sequence[torch.Tensor]
    #: The tensors whose version counts writes to large lasting tensors, where not their own.
    watched: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """The offset of each tensor of a `Flat` in a buffer: the large lasting ones come first."""

    lasting: Sequence[int]
    passing: Sequence[int]
    #: The offset of the first tensor that is not both lasting and large.
    small_at: int
    size: int

    @classmethod
    def of(cls, lasting: Sequence[int], passing: Sequence[int]) -> Layout:
        """Lay out tensors of these sizes in bytes."""
        large = [size if size >= SMALL else 0 for size in lasting]
        small = [size if size < SMALL else 0 for size in lasting]
        large_places, small_at = end_to_end(large)
        small_places, passing_at = end_to_end(small, small_at)
        passing_places, end = end_to_end(passing, passing_at)
        places = [
            first if size else second
            for size, first, second in zip(large, large_places, small_places, strict=True)
        ]
        return cls(places, passing_places, small_at, end)


# --- copies behind the training -------------------------------------------------------------------


class SmallCopies:
    """Copies many small tensors at once, and remembers where from one time to the next."""

    def __init__(self) -> None:
        self._forms: list[object] = []
        self._memory = torch.empty(0)
        self._views: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], memory: torch.Tensor
    ) -> None:
        """Copy the tensors to these offsets of the memory, a tensor of bytes."""
        forms: list[object] = [(one.dtype, one.shape, one.stride()) for one in tensors]
        forms += offsets
        if memory is not self._memory or forms != self._forms:
            self._views = [_view(memory, one, at) for one, at in zip(tensors, offsets, strict=True)]
            self._forms, self._memory = forms, memory
        if self._views:
            torch_private.copy_all(self._views, list(tensors), non_blocking=True)
        if any(one.is_cuda for one in tensors):
            torch.cuda.synchronize()  # what was begun must have arrived


def _view(memory: torch.Tensor, tensor: torch.Tensor, at: int) -> torch.Tensor:
    elements = memory[at : at + tensor.nbytes].view(tensor.dtype)
    return elements.as_strided(tensor.shape, stride_of(tensor))


class BackgroundCopy:
    """A copy in progress: each thread that runs it takes pieces of the work until none is left."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        begin: Callable[[], int],
        *,
        watched: Sequence[torch.Tensor] = (),
    ) -> None:
        """`begin` is called once, by the first thread that runs it, and returns the address that
        the offsets count from. `watched` must not change until the copy is done."""
        self._tensors, self._offsets, self._begin = tensors, offsets, begin
        self._watched = [(tensor, version_of(tensor)) for tensor in watched]
        self._pieces: deque[Callable[[], object]] | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        #: The first thing that went wrong; no thread that only helps has to know it.
        self.error: Exception | None = None
        #: A watched tensor changed meanwhile: the copy is worthless.
        self.is_disturbed = False

    def run(self) -> None:
        """Copy, together with other threads that run it; return when all is copied."""
        while (piece := self._next()) is not None:
            try:
                piece()
            except Exception as error:  # of a device
                self.error = self.error or error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._end()
        self._done.wait()

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._pieces is None:
                self._pieces = deque(self._plan())
                self._left = len(self._pieces)
                if not self._left:
                    self._end()
            return self._pieces.popleft() if self._pieces else None

    def _plan(self) -> list[Callable[[], object]]:
        try:
            address = self._begin()
        except Exception as error:
            self.error = error
            return []
        places = zip(self._tensors, self._offsets, strict=True)
        return [piece for one, at in places for piece in in_pieces(one, address + at)]

    def _end(self) -> None:
        """Check the watched tensors before waiting threads continue and change them."""
        self.is_disturbed = any(version_of(tensor) != count for tensor, count in self._watched)
        # What it refers to may be large.
        self._watched, self._tensors, self._begin = [], (), lambda: 0
        self._done.set()
