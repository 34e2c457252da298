"""Small collectives between ranks: values as JSON, and numbers. No code comes from other machines.

All ranks must call them together: `tests/unit/training/test_joint_decisions.py` lists the callers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import env, torch_backends
from torchelastic.tensors.tensor_bytes import bytes_of


def place() -> tuple[int, int]:
    """Return this rank and the world size."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "Call torch.distributed.init_process_group before restore(): all ranks must agree on "
            "the step to restore."
        )
    return 0, 1


def gather(
    said: Any,
    size: int | None = None,
    all_gather: Callable[[list[torch.Tensor], torch.Tensor], object] | None = None,
) -> list[Any]:
    """Collective: return every rank's value, by rank.

    `size` and `all_gather` are those of another group than the default one.
    """
    size = place()[1] if size is None else size
    all_gather = all_gather or dist.all_gather
    text = json.dumps(said).encode()
    if size == 1:
        return [json.loads(text)]
    device = torch_backends.here()
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    all_gather(lengths, length)
    padded = _padded(text, int(max(lengths))).to(device)
    texts = [torch.empty_like(padded) for _ in range(size)]
    all_gather(texts, padded)
    return [json.loads(bytes_of(one.cpu())) for one in texts]


def of_rank_0(value: Any) -> Any:
    """Collective: return rank 0's value."""
    text = json.dumps(value).encode()
    (length,) = _broadcast(torch.tensor([len(text)])).tolist()
    return json.loads(bytes_of(_broadcast(_padded(text, length))))


def _padded(text: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(length)[:length]), dtype=torch.uint8)


def _broadcast(values: torch.Tensor) -> torch.Tensor:
    sent = values.to(torch_backends.here())
    dist.broadcast(sent, src=0)
    return sent.cpu()


def all_of_them(well: bool) -> bool:
    """Collective: return whether the value is true on every rank."""
    return bool(least(int(well)))


def least(number: int, group: dist.ProcessGroup | None = None) -> int:
    """Collective: return the smallest value of all ranks."""
    _, size = place()
    if size == 1:
        return number
    votes = torch.tensor([number], device=torch_backends.here(group))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return int(votes.item())


def largest(*numbers: int) -> list[int]:
    """Collective: return, for each number, the largest value on any rank."""
    values = torch.tensor(numbers, dtype=torch.int64, device=torch_backends.here())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [int(value) for value in values.tolist()]


def extremes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: return the least and the greatest of each value over all ranks."""
    both = torch.stack([values, -values])
    if place()[1] > 1:
        on_device = both.to(torch_backends.here())
        dist.all_reduce(on_device, op=dist.ReduceOp.MIN)
        both = on_device.cpu()
    return both[0], -both[1]


def quick_group() -> dist.ProcessGroup | None:
    """Collective: return a group for votes that needs no GPU; None if the default one does."""
    _, size = place()
    if size == 1 or torch_backends.is_on_host(dist.get_backend()):
        return None
    made: dist.ProcessGroup = dist.new_group(backend=torch_backends.HOST)
    return made
