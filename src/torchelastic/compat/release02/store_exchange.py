"""0.2's `utils.store`: exchange data through a store. torch's functions of these names take other
arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

__all__ = ["barrier", "get_all", "synchronize"]


def get_all(store: Store, prefix: str, size: int) -> list[bytes]:
    """Wait for the values of `size` ranks and return them by rank."""
    return [store.get(f"{prefix}{rank}") for rank in range(size)]


def synchronize(
    store: Store,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
) -> list[bytes]:
    """Set this rank's value, wait for all others, return all by rank. Use a prefix only once."""
    store.set_timeout(timedelta(seconds=barrier_timeout))
    store.set(f"{key_prefix}{rank}", data)  # type: ignore[arg-type]  # its stub knows only str
    return get_all(store, key_prefix, world_size)


def barrier(
    store: Store, rank: int, world_size: int, key_prefix: str, barrier_timeout: float = 300
) -> None:
    """Wait for all ranks. Use a prefix only once."""
    synchronize(store, str(rank).encode(), rank, world_size, key_prefix, barrier_timeout)
