"""The rank of this process, and the world size."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torchelastic import env
from torchelastic.errors import ConfigError


class OwnRank(NamedTuple):
    """A rank, and the size of the world it belongs to."""

    rank: int
    size: int


def own_rank(rank: int | None = None, size: int | None = None) -> OwnRank:
    """Return the given rank, else that of the default process group, else of the environment.

    Call it whenever the rank matters: a process that outlives its world gets another rank.
    """
    if (rank is None) != (size is None):
        raise ConfigError("Pass both rank and size, or neither.")
    found = _of_group() or _of_environment() if rank is None or size is None else (rank, size)
    if not 0 <= found[0] < found[1]:
        raise ConfigError(
            f"rank {found[0]} is not in a world of size {found[1]}: ranks start at 0."
        )
    return OwnRank(*found)


def _of_group() -> tuple[int, int] | None:
    # Without torch imported there is no process group.
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def _of_environment() -> tuple[int, int]:
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
