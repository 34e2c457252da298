"""The `Store` protocol at an etcd server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence

from torchelastic.clock import Clock, SystemClock
from torchelastic.errors import LeaseExpired, RendezvousError, RendezvousLost
from torchelastic.rendezvous.embedded.endpoint import reachable_address
from torchelastic.rendezvous.etcd import messages
from torchelastic.rendezvous.etcd.feed import Feed
from torchelastic.rendezvous.etcd.line import TROUBLE, Address, Line, Patience
from torchelastic.rendezvous.etcd.messages import JobKeys
from torchelastic.rendezvous.store import Change, Json, Listing

log = logging.getLogger(__name__)

PREFIX = "/torchelastic"
#: Seconds to come back to a lost etcd. Much longer than a lease: an etcd that is restarted, or
#: elects a leader, has forgotten nothing, and the job can go on where it was.
RECONNECT_TIMEOUT = 60.0
#: A lease is renewed this many times before it would end.
RENEWALS = 3
#: Seconds etcd has to take our goodbye.
GOODBYE = 1.0


class _HeldLease:
    """Our lease, as far as we can know: `until` is counted from before the request left."""

    def __init__(self, id: int, seconds: float, sent: float) -> None:
        self.id = id
        self.seconds = seconds
        self.until = sent + seconds

    def renewed(self, sent: float) -> None:
        self.until = max(self.until, sent + self.seconds)


class EtcdStore:
    """The `Store` protocol over etcd's v3 API. Made by `connect`."""

    def __init__(self, line: Line, keys: JobKeys, *, clock: Clock, patience: float) -> None:
        self._line = line
        self._keys = keys
        self._clock = clock
        self._seconds = patience
        #: Makes the stamps of this client's writes its own.
        self._name = secrets.token_hex(8)
        self._ids = itertools.count(1)
        #: Revision at which the job came into being that we belong to.
        self._job = 0
        self._has_written = False
        #: The last revision we know of a key: right most times, since most keys have one writer.
        self._revisions: dict[str, int] = {}
        self._lease: _HeldLease | None = None
        #: The lease to be ended before another is opened; it may be over for us already.
        self._granted: int | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        #: Set when the lease of this connection has ended, cleared by `open_lease`.
        self.lease_lost = asyncio.Event()
        line.lost.add_done_callback(lambda _: self._end_lease(self._lease))

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        job: str,
        *,
        timeout: float | None,
        prefix: str = PREFIX,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
        clock: Clock | None = None,
    ) -> EtcdStore:
        """Connect to the etcd of a job, waiting up to `timeout` seconds (None: for ever) for it.

        Raises `RendezvousLost` if it does not answer, `RendezvousRefused` if it does not let us,
        or is something else.
        """
        clock = clock or SystemClock()
        line = Line(Address(host, port), clock=clock)
        store = cls(line, JobKeys.of(job, prefix), clock=clock, patience=reconnect_timeout)
        limit = math.inf if timeout is None else timeout
        try:
            await store._enter(Patience(line, limit, clock, first=True))
        except BaseException:
            line.close()
            raise
        return store

    @property
    def local_addr(self) -> str:
        """This node's address towards etcd: what its peers can reach as well."""
        return reachable_address(self._line.local_addr, self._line.address.host)

    # The verbs

    async def get(self, prefix: str) -> Listing:
        request = messages.get(self._keys.full(prefix))
        _, answer, (response,) = await self._in_job([], [request], [])
        listing = messages.listing(answer, response, self._keys)
        self._revisions.update((key, item.modified) for key, item in listing.items.items())
        return listing

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        # On condition, too: a request that got stuck on its way must not undo a later one.
        expected = self._revisions.get(key, 0)
        while True:
            won, revision = await self._swap(key, value, expected, leased)
            if won:
                return revision
            expected = revision

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
        won, revision = await self._swap(key, value, expected, leased, beside, provided)
        return revision if won else None

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        self._check()
        feed = Feed(prefix, after, self._revisions)
        patience = self._patience()
        while True:
            request = messages.watch(self._keys.full(prefix), feed.seen)
            stream = self._line.stream(messages.WATCH, request)
            try:
                async with contextlib.aclosing(stream):
                    async for message in stream:
                        patience.restore()
                        for change in await self._news(feed, message):
                            yield change
                        if message.get("canceled"):
                            break
            except TROUBLE as error:
                await patience.wait(error)

    async def keep_alive(self) -> bool:
        lease = self._lease
        self._check()
        if lease is None or lease is not self._lease:
            return False
        sent = self._clock.now()
        answer = await self._call(messages.KEEP_ALIVE, messages.of_lease(lease.id))
        if messages.time_to_live(answer) <= 0:
            self._end_lease(lease)
        else:
            lease.renewed(sent)
        self._check_lease()
        return lease is self._lease

    async def open_lease(self, seconds: float) -> None:
        await self.end_lease()
        id = secrets.randbits(62) + 1
        sent = self._clock.now()
        try:
            # In whole seconds at etcd, and not less than it allows; our own clock ends it in time.
            await self._call(messages.GRANT, messages.grant(id, math.ceil(seconds)))
        except messages.Refused as error:
            if error.code != messages.ALREADY_EXISTS:  # else granted, and the answer got lost
                raise
        self._granted = id
        self._lease = _HeldLease(id, seconds, sent)
        self.lease_lost.clear()
        self._watch_lease()
        self._keeper = asyncio.create_task(self._keep(self._lease), name="rendezvous lease")

    async def end_lease(self) -> None:
        """Give the lease back; its keys go at once."""
        self._check()
        await self._stop_keeping()
        if self._granted is not None:
            try:
                await self._call(messages.REVOKE, messages.of_lease(self._granted))
            except messages.Refused as error:
                if error.code != messages.NOT_FOUND:  # else it has ended by itself
                    raise
            self._granted = None

    async def close(self) -> None:
        granted, self._granted = self._granted, None
        lost = self._line.lost.done()
        await self._stop_keeping()
        self._line.close()
        if granted is None or lost:
            return
        request = self._line.once(messages.REVOKE, messages.of_lease(granted))
        try:
            await asyncio.wait_for(request, GOODBYE)
        except (*TROUBLE, RendezvousError) as error:
            log.debug("the lease could not be given back: %r", error)

    # Beyond the protocol

    async def forget_job(self, last_key: str, revision: int, *beside: str) -> bool:
        """Delete all keys of the job, if `last_key` is as of `revision` (0: absent) and there is
        no other, but for those that begin with one of `beside`; says whether that was done."""
        full = self._keys.full(last_key)
        conditions = [
            messages.if_modified(full, revision),
            *messages.if_alone(
                self._keys.prefix, full, *(self._keys.full(prefix) for prefix in beside)
            ),
        ]
        request = messages.txn(conditions, [messages.delete(self._keys.root)], [])
        answer = await self._call(messages.TXN, request)
        return bool(answer.get("succeeded"))

    # Asking

    def _check(self) -> None:
        """Before a verb does anything: is there still a store, is there still a lease?"""
        self._check_lease()
        self._line.check()

    def _patience(self) -> Patience:
        return Patience(self._line, self._seconds, self._clock)

    async def _call(self, path: str, request: Json) -> Json:
        self._check()
        try:
            return await self._line.call(path, request, self._patience())
        finally:
            # After this process stood still, the answer is old, and so may the lease be.
            self._check_lease()

    async def _enter(self, patience: Patience) -> None:
        """Be of the job that is there now; begin it where there is none."""
        key = self._keys.job
        value = messages.encode_value(key, {}, self._name)
        request = messages.txn(
            [messages.if_created(key, 0)], [messages.put(key, value)], [messages.get_one(key)]
        )
        answer = await self._line.call(messages.TXN, request, patience)
        if answer.get("succeeded"):
            self._job = messages.revision(answer)
        else:
            (response,) = messages.responses(answer, 1)
            self._job = messages.created(messages.rows(response)[0])

    async def _in_job(
        self, compare: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json]
    ) -> tuple[bool, Json, list[Json]]:
        """A transaction of the job we belong to; (succeeded, the answer, its parts).

        Who was away while its job ended must not meddle with the next one of the same id.
        """
        key = self._keys.job
        while True:
            conditions = [messages.if_created(key, self._job), *compare]
            request = messages.txn(conditions, then, [*otherwise, messages.get_one(key)])
            answer = await self._call(messages.TXN, request)
            if answer.get("succeeded"):
                return True, answer, messages.responses(answer, len(then))
            *parts, job = messages.responses(answer, len(otherwise) + 1)
            if [messages.created(row) for row in messages.rows(job)] == [self._job]:
                return False, answer, parts
            if self._has_written:
                self._line.lose(
                    f"The job at {self._line.address} has ended while this node was away from it."
                )
                self._line.check()
            await self._enter(self._patience())

    async def _swap(
        self,
        key: str,
        value: Json,
        expected: int,
        leased: bool,
        beside: Mapping[str, Json] | None = None,
        provided: tuple[str, int] | None = None,
    ) -> tuple[bool, int]:
        """Set a key if its last change was at `expected`; whether that was so, and when the last
        change is now."""
        stamp = f"{self._name}/{next(self._ids)}"
        raw = messages.encode_value(key, value, stamp)
        others = [
            messages.put(self._keys.full(name), messages.encode_value(name, other, stamp))
            for name, other in (beside or {}).items()
        ]
        self._check()
        lease = self._lease
        if leased and lease is None:
            raise LeaseExpired(f"This node holds no lease: '{key}' was not written.")
        full = self._keys.full(key)
        put = messages.put(full, raw, lease.id if leased and lease is not None else 0)
        conditions = [messages.if_modified(full, expected)]
        if provided is not None:
            conditions.append(messages.if_created(self._keys.full(provided[0]), provided[1]))
        try:
            won, answer, parts = await self._in_job(
                conditions, [*others, put], [messages.get_one(full)]
            )
        except messages.Refused as error:
            if error.code != messages.NOT_FOUND or not leased:
                raise
            self._end_lease(lease)
            raise LeaseExpired(
                f"The rendezvous has given this node up: '{key}' was not written."
            ) from error
        self._has_written = True
        revision = messages.revision(answer)
        if not won:
            rows = messages.rows(parts[0])
            revision = messages.modified(rows[0]) if rows else 0
            # Ours, and the answer to the first attempt got lost.
            won = bool(rows) and messages.raw_value(rows[0]) == raw
        self._revisions[key] = revision
        return won, revision

    async def _news(self, feed: Feed, message: Json) -> list[Change]:
        self._check_lease()
        if message.get("compact_revision"):
            return feed.catch_up(await self.get(feed.prefix))
        if message.get("canceled"):  # for no reason of ours
            raise messages.Busy(str(message.get("cancel_reason") or "the watch was ended"))
        news = feed.take(messages.changes(message, self._keys))
        self._revisions.update((change.key, change.revision) for change in news if change.item)
        return news

    # The lease

    async def _keep(self, lease: _HeldLease) -> None:
        """Renew the lease until it ends."""
        while lease is self._lease:
            await asyncio.sleep(lease.seconds / RENEWALS)
            try:
                await self.keep_alive()
            except RendezvousLost:
                return
            except RendezvousError as error:
                # Our own clock ends the lease; whoever asks next is told the reason.
                log.warning("The lease could not be renewed: %s", error)

    def _watch_lease(self) -> None:
        """Set the timer by which the lease is over unless it was renewed."""
        if self._lease is not None:
            delay = max(self._lease.until - self._clock.now(), 0.0)
            loop = asyncio.get_running_loop()
            self._lease_timer = loop.call_later(delay, self._lease_may_be_over)

    def _lease_may_be_over(self) -> None:
        self._check_lease()
        self._watch_lease()

    def _check_lease(self) -> None:
        """Whatever etcd thinks: not renewed in time, a lease may be over, so it is."""
        if self._lease is not None and self._clock.now() >= self._lease.until:
            self._end_lease(self._lease)

    def _end_lease(self, lease: _HeldLease | None) -> None:
        if lease is not None and lease is self._lease:
            self._lease = None
            self.lease_lost.set()
            if self._lease_timer is not None:
                self._lease_timer.cancel()

    async def _stop_keeping(self) -> None:
        """Hold the lease no more; it is given back, not lost."""
        self._lease = None
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
