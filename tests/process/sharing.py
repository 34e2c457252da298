"""One rank of a world in which some have a state and others lack it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.process.forked import build
from torchelastic.errors import TransferError
from torchelastic.tensors import tensor_tree, transfer
from torchelastic.training.group.group import Group


def state(value: int) -> dict[str, Any]:
    """Tensors of many kinds."""
    generator = torch.Generator().manual_seed(value)
    large = torch.rand(5000, generator=generator)
    return {
        "large": large,
        "same": large,
        "small": [torch.full((n,), value, dtype=torch.bfloat16) for n in range(40)],
        "image": torch.rand(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last),
        "gaps": torch.rand(40, 40, generator=generator)[::2, ::2],
        "scalar": torch.tensor(value == 1),
        "empty": torch.empty(0, 3),
        "array": numpy.arange(value, value + 500, dtype=">i4"),
        "nothing": (value, None, {3: 0.5}),
    }


def digest(tree: Any) -> tuple[str, list[bytes]]:
    skeleton, tensors = tensor_tree.flatten(tree)
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
    return skeleton, [one.numpy().tobytes() for one in flat]


def session(rank: int, size: int) -> Any:
    """With limits on messages so low that the state is sent in every way there is."""
    transfer.SMALL, transfer.LARGEST = 256, 4096
    return SimpleNamespace(rank=rank, size=size, received=0)


def exchange(rank: int, port: int, size: int, holders: Sequence[int]) -> Any:
    """What this rank gets, and how many bytes came."""
    build(port, rank, size)
    world = session(rank, size)
    tree = transfer.share(world, state(1) if rank in holders else None, holders=holders)
    dist.barrier()
    return None if tree is None else (digest(tree), world.received)


def in_place(rank: int, port: int) -> Any:
    """Which tensors of its own the rank that lacks a state has got it in."""
    build(port, rank, 2)
    if rank == 0:
        transfer.share(session(0, 2), state(1), holders=[0])
        dist.barrier()
        return None
    own = state(2)
    own["large"] = own["large"][:-1]  # does not fit
    before = dict(tensor_tree.tensors_by_path(own))
    tree = transfer.share(session(1, 2), None, holders=[0], into=own)
    dist.barrier()
    after = dict(tensor_tree.tensors_by_path(tree))
    kept = [p for p, x in after.items() if x.numel() and x.data_ptr() == before[p].data_ptr()]
    return digest(tree), kept


def bereaved(rank: int, port: int) -> Any:
    """The second holder dies when it has sent some of its messages."""
    group = build(port, rank, 3)
    if rank == 1:
        group.before_collective = lambda: _die(group)
    try:
        transfer.share(session(rank, 3), state(1) if rank < 2 else None, holders=[0, 1])
    except RuntimeError as error:
        group.abort("a holder is lost")  # or the other holder would wait to be received from
        return type(error).__name__
    return "whole"


def _die(group: Group) -> None:
    if group.launched >= 2:
        os.kill(os.getpid(), signal.SIGKILL)


def misled(rank: int, port: int, header: list[int], text: bytes) -> Any:
    """What a rank says to a state that is none."""
    build(port, rank, 2)
    if rank == 0:
        # Not waited for: it may be refused before it is read.
        dist.isend(torch.tensor(header), 1)
        dist.isend(torch.frombuffer(bytearray(text), dtype=torch.uint8), 1)
        return None
    try:
        return transfer.share(session(1, 2), None, holders=[0])
    except TransferError as error:
        return str(error)
