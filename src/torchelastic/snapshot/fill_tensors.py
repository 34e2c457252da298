"""Copies a state from the agent's memory into tensors, in parallel on the worker's cores.

Copying is the smaller part of the time. A new worker has touched neither the pages of the memory
it maps nor those of its new optimizer tensors, and getting a page takes longer than filling it. So
several threads wait for pages at the same time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from torchelastic import env
from torchelastic.tensors.tensor_bytes import PIECE, copy_in

#: More threads than this are limited by memory bandwidth.
MOST_THREADS = 8

#: A tensor without gaps, and the address of its bytes.
Source = tuple[torch.Tensor, int]
#: Destination, source, and number of bytes.
Move = tuple[int, int, int]


def load(sources: Sequence[Source]) -> None:
    """Fill every tensor with its bytes."""
    for tensor, address in sources:
        if tensor.device.type != "cpu":
            copy_in(tensor, address)
    shares = list(shared_out([one for one in sources if one[0].device.type == "cpu"]))
    threads = min(threads_of(os.sched_getaffinity(0)), len(shares))
    if threads <= 1:
        for share in shares:
            _perform(share)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="torchelastic-load") as pool:
        for _ in pool.map(_perform, shares):
            pass  # an error of a thread is raised here


def threads_of(cores: set[int]) -> int:
    """Return this worker's share of the cores, which it shares with others on its node.

    >>> threads_of({0, 1})
    2
    """
    workers = max(int(env.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(min(len(cores) // workers, MOST_THREADS), 1)


def shared_out(sources: Sequence[Source]) -> Iterator[list[Move]]:
    """Split the moves into shares of about equal size."""
    share: list[Move] = []
    left = PIECE
    for tensor, address in sources:
        begin, size = tensor.data_ptr(), tensor.nbytes
        at = 0
        while at < size:
            count = min(left, size - at)
            share.append((begin + at, address + at, count))
            at, left = at + count, left - count
            if not left:
                yield share
                share, left = [], PIECE
    if share:
        yield share


def _perform(share: Sequence[Move]) -> None:
    """Copy without holding the GIL."""
    for move in share:
        ctypes.memmove(*move)
