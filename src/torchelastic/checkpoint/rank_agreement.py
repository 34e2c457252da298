"""Small collectives of the default group, for ranks that save together."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import torch_backends
from torchelastic.errors import ConfigError
from torchelastic.tensors.rng import bytes_of


def world() -> tuple[int, int]:
    """Return rank and size in the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "together=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave out together=True."
        )
    return dist.get_rank(), dist.get_world_size()


def largest(*numbers: int) -> list[int]:
    """Return, for each number, the largest value on any rank."""
    values = torch.tensor(numbers, dtype=torch.int64, device=torch_backends.here())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [int(value) for value in values.tolist()]


def of_rank_0(value: Any) -> Any:
    """Return rank 0's value. Sent as JSON: data from another machine is never unpickled."""
    text = json.dumps(value).encode()
    (length,) = _broadcast(torch.tensor([len(text)])).tolist()
    content = torch.frombuffer(bytearray(text.ljust(length)[:length]), dtype=torch.uint8)
    return json.loads(bytes_of(_broadcast(content)))


def _broadcast(values: torch.Tensor) -> torch.Tensor:
    sent = values.to(torch_backends.here())
    dist.broadcast(sent, src=0)
    return sent.cpu()
