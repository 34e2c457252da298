"""The elements of tensors as bytes: their addresses, and copies made while training runs.

A tensor without gaps is one run of bytes, channels-last or not: its elements are taken in memory
order. Those of one with gaps are taken in the order of its dimensions.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

#: Tensors below this many bytes are small: copying one is cheaper than watching it for writes.
SMALL = 64 << 10
#: How much is copied in one go where several threads share the work.
PIECE = 4 << 20


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


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return its elements; the memory itself if it has no gaps."""
    dense = _in_memory_order(tensor) if is_dense(tensor) else tensor.detach().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def address_of(data: memoryview) -> int:
    """Return the address of bytes. Hold the view as long as the address is used."""
    if not len(data):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it must not be written, which nobody does
        return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


@torch.no_grad()
def copy_out(tensor: torch.Tensor, address: int) -> None:
    """Copy the tensor's elements to memory, in one thread and without the GIL.

    (`Tensor.copy_` would use the threads of the training.)
    """
    if _is_at_hand(tensor):
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
    elif tensor.nbytes:
        _bytes_at(address, tensor.nbytes).copy_(bytes_of(tensor))


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
        bytes_of(tensor).copy_(_bytes_at(address, tensor.nbytes))


def _is_at_hand(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_dense(tensor)


def _bytes_at(address: int, count: int) -> torch.Tensor:
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
