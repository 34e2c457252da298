"""The `Store` protocol at an etcd server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from torchelastic.clock import Clock, SystemClock
from torchelastic.config import DEFAULT_ETCD_PORT, parse_endpoints
from torchelastic.errors import LeaseExpired, RendezvousError, RendezvousRefused
from torchelastic.rendezvous.etcd import etcd_messages
from torchelastic.rendezvous.etcd.connection_pool import (
    TEMPORARY_ERRORS,
    Address,
    ConnectionPool,
    RetryLimit,
    client_context,
)
from torchelastic.rendezvous.etcd.etcd_messages import JobKeys
from torchelastic.rendezvous.etcd.settings import EtcdSettings
from torchelastic.rendezvous.membership.lease import HeldLease
from torchelastic.rendezvous.store import Change, Item, Json, Listing
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY

log = logging.getLogger(__name__)

#: Seconds to reconnect to a lost etcd. Much longer than a lease: an etcd that restarts or elects a
#: leader has lost nothing, and the job can continue.
RECONNECT_TIMEOUT = 60.0
#: Renewals of a lease within its time to live: often enough that most of the lease is left when
#: etcd fails.
RENEWALS_PER_LEASE = 10
#: Seconds to revoke our lease when we leave.
GOODBYE_TIMEOUT = 1.0


class EtcdStore:
    """The `Store` protocol over etcd's v3 API. Made by `connect`."""

    most_beside = etcd_messages.KEYS_LIMIT - 1

    def __init__(
        self, pool: ConnectionPool, keys: JobKeys, *, clock: Clock, patience: float, outage: float
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._clock = clock
        self._seconds = patience
        #: Seconds of an etcd outage that a lease must survive.
        self._outage = outage
        #: A random name, which makes the stamps of this client's writes unique.
        self._name = secrets.token_hex(8)
        self._ids = itertools.count(1)
        #: The revision that created our job.
        self._job = 0
        self._has_written = False
        #: The last known revision of each key; usually right, since most keys have one writer.
        self._revisions: dict[str, int] = {}
        self._lease: HeldLease | None = None
        #: The lease to revoke before the next is opened; on our clock it may have ended already.
        self._granted: str | None = None
        self._keeper: asyncio.Task[None] | None = None
        #: Set when this connection's lease has ended; cleared by `open_lease`.
        self.lease_lost = asyncio.Event()
        self._tell_lease: Callable[[float], None] = lambda until: None
        pool.lost.add_done_callback(lambda _: self._lose_lease())

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[tuple[str, int]],
        job: str,
        *,
        timeout: float | None,
        settings: EtcdSettings | None = None,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
        clock: Clock | None = None,
    ) -> EtcdStore:
        """Connect to the etcd of a job, waiting up to `timeout` seconds (None: forever) for it.

        `endpoints` are (host, port) of one or more of its servers. Raises `RendezvousLost` if none
        answers, `RendezvousRefused` if etcd refuses the login or the server is not etcd.
        """
        clock, settings = clock or SystemClock(), settings or EtcdSettings()
        pool = ConnectionPool(
            [Address(*endpoint) for endpoint in endpoints],
            clock=clock,
            tls=None if settings.tls is None else client_context(settings.tls),
            login=settings.login,
        )
        store = cls(
            pool,
            JobKeys.of(job, settings.prefix),
            clock=clock,
            patience=reconnect_timeout,
            outage=settings.outage,
        )
        limit = math.inf if timeout is None else timeout
        try:
            await store._enter(RetryLimit(pool, limit, clock, first=True))
        except BaseException:
            pool.close()
            raise
        return store

    @property
    def local_addr(self) -> str:
        """This node's address on the route to etcd; its peers can reach it there."""
        return self._pool.local_addr

    # The `Store` protocol

    async def get(self, prefix: str) -> Listing:
        request = etcd_messages.get(self._keys.full(prefix))
        _, answer, (response,) = await self._in_job([], lambda _: [request])
        listing = etcd_messages.listing(answer, response, self._keys)
        self._revisions.update((key, item.modified) for key, item in listing.items.items())
        return listing

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        # Conditional as well: a delayed request must not undo a later one.
        expected = self._revisions.get(key, 0)
        while True:
            won, revision = await self._swap(key, value, expected, leased)
            if won:
                return revision
            expected = revision

    async def report(self, key: str, value: Json) -> None:
        # Wait for its answer: requests in flight at the same time have no order.
        await self.put(key, value, leased=True)

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
        # Before that there are only earlier jobs.
        events = WatchEvents(prefix, max(after, self._job), self._revisions)
        patience = self._patience()
        while True:
            request = etcd_messages.watch(self._keys.full(prefix), events.seen)
            stream = self._pool.stream(etcd_messages.WATCH, request)
            try:
                async with contextlib.aclosing(stream):
                    async for message in stream:
                        patience.restore()
                        for change in await self._news(events, message):
                            yield change
                        if message.get("canceled"):
                            break
            except TEMPORARY_ERRORS as error:
                await patience.wait(error)

    async def follow(self, key: str) -> AsyncGenerator[Item | None, None]:
        listing = await self.get(key)
        yield listing.items.get(key)
        async with contextlib.aclosing(self.watch(key, after=listing.revision)) as changes:
            async for change in changes:
                if change.key == key:
                    yield change.item

    async def latest(self, key: str) -> Item | None:
        return (await self.get(key)).items.get(key)

    async def keep_alive(self) -> bool:
        self._check()
        lease = self._held()
        if lease is None:
            return False
        sent = self._clock.now()
        answer = await self._call(etcd_messages.KEEP_ALIVE, etcd_messages.of_lease(lease.id))
        if etcd_messages.time_to_live(answer) <= 0:
            lease.end()
        else:
            lease.renewed(sent)
        return lease.check()

    def tell_lease(self, tell: Callable[[float], None]) -> None:
        self._tell_lease = tell
        if (lease := self._held()) is not None:
            tell(lease.until)

    async def resume_lease(self, seconds: float) -> bool:
        self._check()
        if self._granted is None:
            return False
        await self._stop_renewing()
        sent = self._clock.now()
        answer = await self._call(etcd_messages.KEEP_ALIVE, etcd_messages.of_lease(self._granted))
        if etcd_messages.time_to_live(answer) <= 0:
            return False
        self._hold_lease(self._granted, seconds, sent)
        return True

    async def open_lease(self, seconds: float) -> None:
        await self.end_lease()
        id = str(secrets.randbits(62) + 1)
        lasting = max(seconds, self._outage)
        sent = self._clock.now()
        try:
            # etcd counts whole seconds, and has a minimum; our own clock ends the lease in time.
            await self._call(etcd_messages.GRANT, etcd_messages.grant(id, math.ceil(lasting)))
        except etcd_messages.EtcdRefused as error:
            if (
                error.code != etcd_messages.FAILED_PRECONDITION
            ):  # otherwise granted, but the answer was lost
                raise
        self._granted = id
        self._hold_lease(id, seconds, sent)

    def _hold_lease(self, id: str, seconds: float, sent: float) -> None:
        """Hold a lease that was granted or renewed by a request sent then."""
        lasting = max(seconds, self._outage)
        self._lease = HeldLease(
            id,
            seconds=lasting,
            standstill=seconds,
            sent=sent,
            clock=self._clock,
            lost=self.lease_lost,
            on_until=lambda until: self._tell_lease(until),
        )
        renewing = self._lease.keep(self.keep_alive, lasting / RENEWALS_PER_LEASE)
        self._keeper = asyncio.create_task(renewing, name="rendezvous lease")

    async def end_lease(self) -> None:
        """Revoke the lease; its keys are deleted at once."""
        self._check()
        await self._stop_renewing()
        if self._granted is not None:
            await self._revoke(self._granted)
            self._granted = None

    async def give_up(
        self, key: str, *, created: int, provided: tuple[str, int] | None = None
    ) -> None:
        full = self._keys.full(key)
        look = [etcd_messages.get_one(full)]
        _, _, (found,) = await self._in_job([], lambda _: look)
        rows = etcd_messages.rows(found)
        if not rows or etcd_messages.created(rows[0]) != created:
            return
        # A transaction cannot revoke a lease. So it deletes the key conditionally, and then the
        # lease, whose number is unique, is revoked.
        done, _, parts = await self._in_job(
            [etcd_messages.if_created(full, created), *self._fence(provided)],
            lambda _: [etcd_messages.delete_one(full)],
            look,
        )
        lease = etcd_messages.lease_of(rows[0])
        # Already gone: the answer to a first attempt may have been lost.
        if lease != "0" and (done or not etcd_messages.rows(parts[0])):
            await self._revoke(lease)

    async def close(self) -> None:
        granted, self._granted = self._granted, None
        lost = self._pool.lost.done()
        await self._stop_renewing()
        self._pool.close()
        if granted is None or lost:
            return
        request = self._pool.once(etcd_messages.REVOKE, etcd_messages.of_lease(granted))
        try:
            await asyncio.wait_for(request, GOODBYE_TIMEOUT)
        except (*TEMPORARY_ERRORS, RendezvousError) as error:
            log.debug("could not revoke the lease: %r", error)

    # Beyond the protocol

    async def forget_job(self, last_key: str, revision: int, *beside: str) -> bool:
        """Delete all keys of the job, if `last_key` last changed at `revision` (0: absent) and all
        other keys start with one of `beside`. Return whether they were deleted."""
        full = self._keys.full(last_key)
        conditions = [
            etcd_messages.if_created(self._keys.job, self._job),
            etcd_messages.if_modified(full, revision),
            *etcd_messages.if_no_other_keys(
                self._keys.prefix, full, *(self._keys.full(prefix) for prefix in beside)
            ),
        ]
        request = etcd_messages.txn(conditions, [etcd_messages.delete(self._keys.root)], [])
        answer = await self._call(etcd_messages.TXN, request)
        return bool(answer.get("succeeded"))

    # Asking

    def _check(self) -> None:
        """Check that the store and, if needed, the lease still exist."""
        self._check_lease()
        self._pool.check()

    def _patience(self) -> RetryLimit:
        return RetryLimit(self._pool, self._seconds, self._clock)

    async def _call(self, path: str, request: Json) -> Json:
        self._check()
        try:
            return await self._pool.call(path, request, self._patience())
        finally:
            # After a freeze of this process, the answer is old, and the lease may have ended.
            self._check_lease()

    async def _enter(self, patience: RetryLimit) -> None:
        """Join the current job; create it if there is none."""
        key = self._keys.job
        value = etcd_messages.encode_value({}, stamp=self._name, job=0)
        request = etcd_messages.txn(
            [etcd_messages.if_created(key, 0)],
            [etcd_messages.put(key, value)],
            [etcd_messages.get_one(key)],
        )
        answer = await self._pool.call(etcd_messages.TXN, request, patience)
        if answer.get("succeeded"):
            self._job = etcd_messages.revision(answer)
        else:
            (response,) = etcd_messages.responses(answer, 1)
            self._job = etcd_messages.created(etcd_messages.rows(response)[0])

    async def _in_job(
        self,
        compare: Sequence[Json],
        then: Callable[[int], Sequence[Json]],
        otherwise: Sequence[Json] = (),
    ) -> tuple[bool, Json, list[Json]]:
        """Run a transaction in our job; return (succeeded, the answer, its parts).

        `then` receives the job. A node that was disconnected while its job ended must not change
        the next job with the same id.
        """
        key = self._keys.job
        while True:
            conditions = [etcd_messages.if_created(key, self._job), *compare]
            work = then(self._job)
            request = etcd_messages.txn(conditions, work, [*otherwise, etcd_messages.get_one(key)])
            answer = await self._call(etcd_messages.TXN, request)
            if answer.get("succeeded"):
                return True, answer, etcd_messages.responses(answer, len(work))
            *parts, job = etcd_messages.responses(answer, len(otherwise) + 1)
            if [etcd_messages.created(row) for row in etcd_messages.rows(job)] == [self._job]:
                return False, answer, parts
            if self._has_written:
                self._pool.lose(f"The job at {self._pool} ended while this node was disconnected.")
                self._pool.check()
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
        """Set a key if its last change was at `expected`; return whether it was, and the revision
        of its last change now."""
        self._check()
        lease = self._held() if leased else None
        if leased and lease is None:
            raise LeaseExpired(f"This node has no lease: '{key}' was not written.")
        full = self._keys.full(key)
        stamp = f"{self._name}/{next(self._ids)}"
        # The key itself last: a watcher that learns of it finds the others.
        values = {**(beside or {}), key: value}
        leases = {} if lease is None else dict.fromkeys(values, lease.id)
        try:
            won, answer, parts = await self._in_job(
                [etcd_messages.if_modified(full, expected), *self._fence(provided)],
                lambda job: etcd_messages.puts(self._keys, values, leases, stamp=stamp, job=job),
                [etcd_messages.get_one(full)],
            )
        except etcd_messages.EtcdRefused as error:
            if error.code != etcd_messages.NOT_FOUND or lease is None:
                raise
            lease.end()
            raise LeaseExpired(
                f"The rendezvous dropped this node: '{key}' was not written."
            ) from error
        self._has_written = True
        revision = etcd_messages.revision(answer)
        if not won:
            rows = etcd_messages.rows(parts[0])
            revision = etcd_messages.modified(rows[0]) if rows else 0
            # It is ours; the answer to the first attempt was lost.
            won = bool(rows) and etcd_messages.stamp_of(rows[0]) == stamp
        self._revisions.update(dict.fromkeys(values if won else [key], revision))
        return won, revision

    def _fence(self, provided: tuple[str, int] | None) -> list[Json]:
        if provided is None:
            return []
        key, modified = provided
        return [etcd_messages.if_modified(self._keys.full(key), modified)]

    async def _news(self, events: WatchEvents, message: Json) -> list[Change]:
        self._check_lease()
        is_ours = not etcd_messages.is_of_another_job(message, self._job)
        if message.get("compact_revision") or not is_ours:
            # It belongs to another job: either we are in that one now, or the caller learns that
            # ours has ended.
            return events.catch_up(await self.get(events.prefix))
        news = events.take(etcd_messages.changes(message, self._keys))
        self._revisions.update((change.key, change.revision) for change in news if change.item)
        return news

    # The lease

    def _held(self) -> HeldLease | None:
        return self._lease if self._lease is not None and self._lease.is_held else None

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _lose_lease(self) -> None:
        if self._lease is not None:
            self._lease.end()

    async def _revoke(self, lease: str) -> None:
        try:
            await self._call(etcd_messages.REVOKE, etcd_messages.of_lease(lease))
        except etcd_messages.EtcdRefused as error:
            if error.code != etcd_messages.NOT_FOUND:  # otherwise it has expired
                raise

    async def _stop_renewing(self) -> None:
        """Stop renewing the lease; it is returned, not lost."""
        if self._lease is not None:
            self._lease.give_back()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None


class WatchEvents:
    """The changes under a prefix, each once, in order.

    etcd forgets old changes after a compaction. A watch that asks for such changes restarts from a
    listing; a key missing there has been deleted. To detect that, this keeps the names of all keys
    that its caller may know.
    """

    def __init__(self, prefix: str, after: int, known: Iterable[str]) -> None:
        self.prefix = prefix
        self.seen = after
        self._known = {key for key in known if key.startswith(prefix)}

    def take(self, changes: Iterable[Change]) -> list[Change]:
        """The new changes."""
        news = [change for change in changes if change.revision > self.seen]
        for change in news:
            # Only after all of them: several changes may have one revision, as when a lease ends.
            self.seen = change.revision
            if change.item is None:
                self._known.discard(change.key)
            else:
                self._known.add(change.key)
        return news

    def catch_up(self, listing: Listing) -> list[Change]:
        """The changes between the last one delivered and a listing: the last of each key."""
        put = [
            Change(key, item, item.modified)
            for key, item in listing.items.items()
            if item.modified > self.seen
        ]
        put.sort(key=lambda change: change.revision)
        gone = [
            Change(key, None, listing.revision) for key in sorted(self._known - set(listing.items))
        ]
        self.seen = listing.revision
        self._known = set(listing.items)
        return [*put, *gone]


# --- the store of a job --------------------------------------------------------------------------

# A closed world stays there for nodes that are slow to see it, but not forever: the next job with
# the same id would take it for its own end. The last node to leave removes it; if that node was
# killed, the first node of the next job does. A job whose nodes were all killed is not closed: it
# continues, with its generation and budget, when nodes come back.

#: Seconds for the last node to remove the job's keys.
CLEANUP_TIMEOUT = 2.0


async def open_store(
    endpoint: str,
    run_id: str,
    options: Mapping[str, str],
    *,
    timeout: float | None,
    clock: Clock,
) -> EtcdStore:
    """Connect to the store of a job at etcd.

    Waits up to `timeout` seconds (None: forever) for etcd. `options` are those of `--rdzv-conf` or
    of a rendezvous URL. Raises `RendezvousLost`, `RendezvousRefused` or `ConfigError`.
    """
    store = await EtcdStore.connect(
        parse_endpoints(endpoint, DEFAULT_ETCD_PORT),
        run_id,
        timeout=timeout,
        settings=EtcdSettings.of(options),
        clock=clock,
    )
    try:
        await remove_closed_job(store, timeout)
    except BaseException:
        await store.close()
        raise
    return store


async def close_store(store: EtcdStore) -> None:
    """Leave; the last node removes the job's keys."""

    async def leave() -> None:
        await store.end_lease()
        await remove_if_finished(store)

    try:
        await asyncio.wait_for(leave(), CLEANUP_TIMEOUT)
    except (RendezvousError, asyncio.TimeoutError) as error:
        # Not worth waiting for: the next job with this id finds the keys, and removes them.
        log.debug("could not clean up the job's keys in etcd: %r", error)
    await store.close()


async def remove_if_finished(store: EtcdStore) -> bool:
    """Delete the keys of a job if it is closed, or never started, and has no node."""
    listing = await store.get("")
    world = listing.items.get(WORLD_KEY)
    if world is not None and not _is_closed(world):
        return False
    modified = 0 if world is None else world.modified
    return await store.forget_job(WORLD_KEY, modified, PART_PREFIX)


async def remove_closed_job(store: EtcdStore, timeout: float | None) -> None:
    """Before joining, wait for the nodes of a closed job with this id to exit, and remove its keys.

    It is not the job to join: that one has not started yet. Waits up to `timeout` seconds (None:
    forever).
    """
    try:
        await asyncio.wait_for(_wait_for_exit(store), timeout)
    except asyncio.TimeoutError:
        raise RendezvousRefused(
            "An earlier job with the same --rdzv-id is closed, but some of its nodes are still "
            f"running after {timeout:g} s: stop them, or use another id."
        ) from None


async def _wait_for_exit(store: EtcdStore) -> None:
    while True:
        listing = await store.get("")
        world = listing.items.get(WORLD_KEY)
        if world is None or not _is_closed(world):
            return
        if await store.forget_job(WORLD_KEY, world.modified, PART_PREFIX):
            return
        log.info("an earlier job with the same id is ending; waiting for its nodes to exit")
        async with contextlib.aclosing(store.watch("", after=listing.revision)) as changes:
            await anext(changes)


def _is_closed(world: Item) -> bool:
    return world.value.get("phase") == "closed"
