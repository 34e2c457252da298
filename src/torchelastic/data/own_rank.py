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


#: This worker's place among the workers that read different samples, if it is not its rank.
_place: tuple[int, int] | None = None


def set_place(rank: int, size: int) -> None:
    """Set which share of the samples this worker reads, in a world of sharded replicas."""
    global _place
    _place = rank, size


def own_rank(rank: int | None = None, size: int | None = None) -> OwnRank:
    """Return the given rank, else the place in a world of sharded replicas, else the rank in the
    default process group, else that of the environment.

    Call it whenever the rank matters: a process that outlives its world gets another rank.
    """
    if (rank is None) != (size is None):
        raise ConfigError("Pass both rank and size, or neither.")
    if rank is None or size is None:
        found = _place or _of_group() or _of_environment()
    else:
        found = rank, size
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
