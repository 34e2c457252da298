"""What ranks of a script tell each other before one of them overwrites anything."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import env, torch_backends


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "Call torch.distributed.init_process_group before restore(): all ranks must agree on "
            "the step to restore."
        )
    return 0, 1


def gather(said: Any) -> list[Any]:
    """Collective: what every rank says, by rank. JSON, so that nothing in it is run."""
    _, size = place()
    text = json.dumps(said).encode()
    if size == 1:
        return [json.loads(text)]
    device = torch_backends.here()
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length)
    longest = int(max(lengths))
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded)
    return [json.loads(one.cpu().numpy().tobytes()) for one in texts]


def all_of_them(well: bool) -> bool:
    """Collective: whether every rank says that it is well."""
    return bool(least(int(well)))


def least(number: int, group: dist.ProcessGroup | None = None) -> int:
    """Collective: the smallest of what the ranks say."""
    _, size = place()
    if size == 1:
        return number
    votes = torch.tensor([number], device=torch_backends.here(group))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return int(votes.item())


def quick_group() -> dist.ProcessGroup | None:
    """Collective: a group whose votes no GPU has to be waited for; None: the default one is."""
    _, size = place()
    if size == 1 or torch_backends.is_on_host(dist.get_backend()):
        return None
    made: dist.ProcessGroup = dist.new_group(backend=torch_backends.HOST)
    return made
