"""The store interface of the rendezvous: five verbs, on keys that are paths and values that are
JSON.

Every change has a revision; revisions only grow. A key put with a lease is deleted when the lease
ends. A lease ends when nobody has kept it alive for its time to live, or when it is revoked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

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
    """A connection to the store of one job. Every verb may raise `RendezvousLost`.

    A broken connection is remade automatically; verbs wait meanwhile. `RendezvousLost` means that
    it could not be remade in time; from then on every verb raises it.
    """

    #: Set when the lease has ended, as the store says or as our own clock must assume, and before
    #: any other verb succeeds; cleared by `open_lease`.
    lease_lost: asyncio.Event
    #: How many keys can be set beside another one.
    most_beside: int

    @property
    def local_addr(self) -> str:
        """The address of this node that its peers can reach."""
        ...

    async def get(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        """Set a key, under this connection's lease if asked; returns the revision.

        A key put without a lease stays, whatever it was under before. Raises `LeaseExpired` when
        the lease is over: nothing is written then.
        """
        ...

    async def report(self, key: str, value: Json) -> None:
        """Set a key under this connection's lease, as `put` does; but it may return as soon as the
        request is on its way. Reports of a key arrive in order, and before later requests.

        If the lease turns out to have ended, `lease_lost` is set.
        """
        ...

    async def compare_and_set(
        self,
        key: str,
        value: Json,
        *,
        expected: int,
        leased: bool = False,
        beside: Mapping[str, Json] | None = None,
        provided: tuple[str, int] | None = None,
    ) -> int | None:
        """Set a key whose last change was at revision `expected` (0: it is absent).

        `beside` are other keys, set in the same change and under the same lease, if any: nobody
        sees one of them new and another one old. `provided` names a key and the revision that
        created it, as one more condition: nothing is set if that key is gone or was put anew.

        Returns the new revision of `key`, None if a condition does not hold. Raises as `put` does.
        """
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """Every change under a prefix after a revision, in order, without gaps.

        From further back than the store remembers, the last change of each key stands for all of
        its changes; deletions are never left out. Close it (`aclosing`) to stop watching.
        """
        ...

    def follow(self, key: str) -> AsyncGenerator[Item | None, None]:
        """Yield a key as it is now, None if it is absent, and then after every change.

        This is `get` and `watch` of the key in one request. Close it to stop.
        """
        ...

    async def latest(self, key: str) -> Item | None:
        """A key, None if it is absent, for callers that read the same one again and again.

        It is no older than what any verb of this connection has returned, but need not be newer: a
        store that is told of changes answers locally.
        """
        ...

    async def keep_alive(self) -> bool:
        """Renew this connection's lease; False if it has ended.

        An open lease is also renewed by itself.
        """
        ...

    async def open_lease(self, seconds: float) -> None:
        """Open a lease for this connection; one it still has is ended first."""
        ...

    async def give_up(
        self, key: str, *, created: int, provided: tuple[str, int] | None = None
    ) -> None:
        """End the lease, of any client, that a key is under: all its keys are deleted, and its
        holder is told.

        Nothing happens unless the key was created at revision `created` (the key of a member that
        has come back is another one) and `provided`, as in `compare_and_set`, holds.
        """
        ...

    async def close(self) -> None:
        """End the lease (its keys go at once) and the connection."""
        ...
