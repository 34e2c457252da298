"""The store interface of the rendezvous: five operations on keys (paths) and values (JSON).

Every change has a revision; revisions only grow. A key put with a lease is deleted when the lease
ends: when it has not been kept alive for its time to live, or when it is revoked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

Json = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A key's value, and the revisions of its creation and last change."""

    value: Json
    #: The revision that created the key; members are ordered by it.
    created: int
    #: The revision of the last change; compare-and-set compares it.
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
    """A connection to the store of one job. Every operation may raise `RendezvousLost`.

    A broken connection is restored automatically; operations wait meanwhile. `RendezvousLost` means
    that it could not be restored in time; from then on every operation raises it.
    """

    #: Set when the lease has ended, according to the store or to our own clock, before any other
    #: operation succeeds; cleared by `open_lease`.
    lease_lost: asyncio.Event
    #: The most keys that one `compare_and_set` can set beside its own.
    most_beside: int

    @property
    def local_addr(self) -> str:
        """The address of this node that its peers can reach."""
        ...

    async def get(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        """Set a key, under this connection's lease if asked; returns the revision.

        A key put without a lease stays, even if it was under one before. Raises `LeaseExpired` if
        the lease has ended; nothing is written then.
        """
        ...

    async def report(self, key: str, value: Json) -> None:
        """Set a key under this connection's lease, as `put` does, but return as soon as the request
        is sent. Reports of one key arrive in order, and before later requests.

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

        `beside` are other keys, set in the same change and under the same lease: no reader sees one
        of them new and another old. `provided` names a key and the revision of its last
        change, as a second condition: nothing is set if that key is gone or has changed.

        Returns the new revision of `key`, None if a condition does not hold. Raises as `put` does.
        """
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """Every change under a prefix after a revision, in order, without gaps.

        Beyond the store's history, the last change of each key stands for all of its changes;
        deletions are never left out. Close it (`aclosing`) to stop watching.
        """
        ...

    def follow(self, key: str) -> AsyncGenerator[Item | None, None]:
        """Yield a key as it is now, None if it is absent, and then after every change.

        This is `get` and `watch` of the key in one request. Close it to stop.
        """
        ...

    async def latest(self, key: str) -> Item | None:
        """A key, None if it is absent, for callers that read the same key repeatedly.

        It is no older than any result that this connection has returned, but may not be newer: the
        store answers from local memory if it receives changes.
        """
        ...

    async def resume_lease(self, seconds: float) -> bool:
        """Hold this connection's lease again, if it ended only on our clock and the store still has
        it: its keys were there all the time. Return whether it is held."""
        ...

    async def keep_alive(self) -> bool:
        """Renew this connection's lease; False if it has ended.

        An open lease is also renewed automatically.
        """
        ...

    def tell_lease(self, tell: Callable[[float], None]) -> None:
        """Call `tell` with the time until which the lease is held: now, if there is one, and after
        every renewal."""
        ...

    async def open_lease(self, seconds: float) -> None:
        """Open a lease for this connection; its current one is ended first."""
        ...

    async def give_up(
        self, key: str, *, created: int, provided: tuple[str, int] | None = None
    ) -> None:
        """End the lease that a key is under, whichever client holds it: all its keys are deleted,
        and its holder is notified.

        Nothing happens unless the key was created at revision `created` (a member that has come
        back has another key) and `provided` holds, as in `compare_and_set`.
        """
        ...

    async def close(self) -> None:
        """End the lease (its keys go at once) and the connection."""
        ...
