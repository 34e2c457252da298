"""Which rank this process is, and of how many."""

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
    """What the caller says, else the default process group, else the environment, else alone.

    Asked anew whenever it matters: a process that lives from world to world changes its rank.
    """
    if (rank is None) != (size is None):
        raise ConfigError("rank and size belong together: give both, or none.")
    found = _of_group() or _of_environment() if rank is None or size is None else (rank, size)
    if not 0 <= found[0] < found[1]:
        raise ConfigError(f"There is no rank {found[0]} in a world of {found[1]}: 0 is the first.")
    return OwnRank(*found)


def _of_group() -> tuple[int, int] | None:
    # Whoever has not imported torch has no process group.
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def _of_environment() -> tuple[int, int]:
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
