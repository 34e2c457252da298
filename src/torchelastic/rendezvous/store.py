"""What the rendezvous needs from a store: five verbs, on keys that are paths and values that are JSON.

Every change has a revision; revisions only grow. A key put with a lease is deleted when the lease
ends, and a lease ends when nobody has kept it alive for its time to live, or when it is revoked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A key's value and its place in history."""

    value: Json
    #: Revision at which the key came into being; it orders members by arrival.
    created: int
    #: Revision of the last change; what compare-and-set compares.
    modified: int


@dataclass(frozen=True)
class Listing:
    """All keys under a prefix, as of a revision."""

    revision: int
    items: dict[str, Item]


@dataclass(frozen=True)
class Change:
    """One key put (`item`) or deleted (`item is None`)."""

    key: str
    item: Item | None
    revision: int


class Store(Protocol):
    """One connection to a store, of one job. Every verb may raise `RendezvousLost`."""

    async def get(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        """Set a key, under this connection's lease if asked; returns the revision.

        Raises `LeaseExpired` when the lease is over: nothing is written then.
        """
        ...

    async def compare_and_set(
        self, key: str, value: Json, *, expected: int, leased: bool = False
    ) -> int | None:
        """Set a key whose last change was at revision `expected` (0: it is absent).

        Returns the new revision, None if the key has changed meanwhile.
        """
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        """Every change under a prefix after a revision, in order, without gaps."""
        ...

    async def keep_alive(self) -> bool:
        """Renew this connection's lease; False if it has ended. A new one is opened by `open_lease`."""
        ...

    async def open_lease(self, seconds: float) -> None:
        """Open a lease for this connection, in place of an ended one."""
        ...

    async def close(self) -> None:
        """End the lease (its keys go at once) and the connection."""
        ...
