"""What the ranks that save together have to agree on; small collectives of the default group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import torch_backends
from torchelastic.errors import ConfigError


def world() -> tuple[int, int]:
    """Rank and size; all ranks of the default group take part."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "together=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave out together=True."
        )
    return dist.get_rank(), dist.get_world_size()


def largest(*numbers: int) -> list[int]:
    """For each of them, the largest that any rank has."""
    values = torch.tensor(numbers, dtype=torch.int64, device=torch_backends.here())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [int(value) for value in values.tolist()]


def of_rank_0(value: Any) -> Any:
    """What rank 0 has given, as JSON: what comes from another machine is not unpickled."""
    text = json.dumps(value).encode()
    (length,) = _broadcast(torch.tensor([len(text)])).tolist()
    content = torch.frombuffer(bytearray(text.ljust(length)[:length]), dtype=torch.uint8)
    return json.loads(_broadcast(content).numpy().tobytes())


def _broadcast(values: torch.Tensor) -> torch.Tensor:
    sent = values.to(torch_backends.here())
    dist.broadcast(sent, src=0)
    return sent.cpu()
