"""The store interface of the rendezvous: five operations on keys (paths) and values (JSON); and a
lease, as its holder sees it.

Every change has a revision; revisions only grow. A key put with a lease is deleted when the lease
ends: when it has not been kept alive for its time to live, or when it is revoked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchelastic.clock import Clock
from torchelastic.errors import RendezvousError, RendezvousLost

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


log = logging.getLogger(__name__)

#: The loop shows this many times that it runs before it would count as standing still.
SIGNS_OF_LIFE = 4


# --- a lease, as its holder sees it --------------------------------------------------------------

# The store ends a lease that is not renewed in time, and says so when asked. But an unreachable
# store cannot be asked, and an answer that is read late is outdated. So the holder also ends its
# lease by its own clock, never later than the store does, and at once after it was frozen itself:
# the others may then have dropped it, whatever the store still says.


class HeldLease:
    """One lease, from its opening until it ends or is given back. Made in a running loop.

    It ends `seconds` after the last renewal was asked for, and when the loop has not run for
    `standstill` seconds; then `lost` is set. Call `check` before acting on an answer: after a
    freeze of the process, received data is read before any timer runs.
    """

    def __init__(
        self,
        id: str,
        *,
        seconds: float,
        standstill: float,
        sent: float,
        clock: Clock,
        lost: asyncio.Event,
        on_until: Callable[[float], None] = lambda until: None,
    ) -> None:
        """`on_until` receives the time until which it is held, again after every renewal."""
        self.id = id
        self.is_held = True
        self._seconds = seconds
        self._standstill = standstill
        #: Counted from before the request left: the store counts from when it came.
        self.until = sent + seconds
        self._clock = clock
        self._lost = lost
        self._on_until = on_until
        #: When the loop was last seen to run.
        self._seen = clock.now()
        self._timer = self._set_timer()
        lost.clear()
        on_until(self.until)

    def renewed(self, sent: float) -> None:
        """Note that the store has renewed it, asked at `sent`."""
        self.until = max(self.until, sent + self._seconds)
        self._on_until(self.until)

    def check(self) -> bool:
        """Return whether it is still held; ends it if it may be over."""
        now = self._clock.now()
        if now >= self.until or now - self._seen >= self._standstill:
            self.end()
        self._seen = now
        return self.is_held

    def end(self) -> None:
        """Mark the lease as lost, by the store's word or by assumption."""
        if self.is_held:
            self.give_back()
            self._lost.set()

    def give_back(self) -> None:
        """Stop holding it; it is not lost."""
        self.is_held = False
        self._timer.cancel()

    async def keep(self, renew: Callable[[], Awaitable[object]], every: float) -> None:
        """Renew it periodically until it ends."""
        while self.is_held:
            await asyncio.sleep(every)
            try:
                await renew()
            except RendezvousLost:
                return
            except RendezvousError as error:
                # Our own clock ends the lease; the next request gets the reason.
                log.warning("The lease could not be renewed: %s", error)

    def _set_timer(self) -> asyncio.TimerHandle:
        left = self.until - self._clock.now()
        delay = max(min(left, self._standstill / SIGNS_OF_LIFE), 0.0)
        return asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        if self.check():
            self._timer = self._set_timer()
