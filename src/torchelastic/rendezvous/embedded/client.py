"""A client's connection to the embedded store: the store's operations over a connection that may
break.

An operation is a request that is kept until it is answered. When the connection is lost, it is made
again at once, the lease is resumed, the watches continue after the last change they saw, and
unanswered requests are sent again (the server performs each once, see `Table.revision_of`). Callers
notice only a delay, until the store stays unreachable: then everything raises `RendezvousLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

from torchelastic.clock import Clock, SystemClock
from torchelastic.config import format_endpoint
from torchelastic.errors import (
    LeaseExpired,
    RendezvousError,
    RendezvousLost,
    WireError,
)
from torchelastic.rendezvous.membership.lease import HeldLease
from torchelastic.rendezvous.store import Change, Item, Json, Listing
from torchelastic.transport import frames
from torchelastic.transport.addresses import can_be_told, reachable_address
from torchelastic.transport.connect import Endpoint, connect_to_host
from torchelastic.transport.frames import Row
from torchelastic.transport.link import Link

log = logging.getLogger(__name__)

#: Seconds to reconnect to a lost store while there is no lease.
RECONNECT_TIMEOUT = 3.0
#: Renewals of a lease within its time to live.
RENEWALS_PER_LEASE = 3
#: Seconds to reconnect to a host that another node could replace; the host drops us sooner.
FAILOVER_RECONNECT_TIMEOUT = 0.15
#: Seconds to deliver our goodbye to the server.
GOODBYE_TIMEOUT = 1.0


class _Silence(ConnectionError):
    """The server does not answer, although nothing refuses what we send."""


class _Request:
    """A request that has no answer yet."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.answer: asyncio.Future[frames.Message] = asyncio.get_running_loop().create_future()
        #: The parts of an answer in several frames.
        self.rows: list[Row] = []


class EmbeddedStore:
    """The `Store` protocol over the embedded server. Made by `connect`."""

    #: As many short values as fit in a frame.
    most_beside = frames.FRAME_LIMIT // 1024

    def __init__(self, place: Endpoint, *, clock: Clock, reconnect_timeout: float | None) -> None:
        #: The address of the host; until it is found, the first address to try.
        self.place = place
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._given_timeout = reconnect_timeout
        #: Seconds without a connection after which the store is lost.
        self._loss_timeout = RECONNECT_TIMEOUT if reconnect_timeout is None else reconnect_timeout
        #: A random name, which makes the stamps of this client's writes unique.
        self._name = secrets.token_hex(8)
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        #: The last report of each key, and its id, until an answer shows that it arrived.
        self._reports: dict[str, tuple[int, bytes]] = {}
        self._watch_queues: list[WatchQueue] = []
        self._memos: dict[str, Memo] = {}
        #: Watches that wait for the current rows, by request id.
        self._catching_up: dict[int, WatchQueue] = {}
        self._link: Link | None = None
        self._store_name = ""
        #: The term of the store's host; 0: a server that no node would replace.
        self.term = 0
        self._local_addr = ""
        #: The address at which the last connection reached the host, unless only this machine can.
        self._reached_at: list[str] = []
        #: Why the store is lost; None while it is not.
        self._lost: str | None = None
        self._connector: asyncio.Task[None] | None = None
        self._lease: HeldLease | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        #: When the last frame came, and when the oldest unanswered request was sent.
        self._heard_at = self._asked_at = 0.0
        #: Set when this connection's lease has ended; cleared by `open_lease`.
        self.lease_lost = asyncio.Event()
        self._tell_lease: Callable[[float], None] = lambda until: None
        #: Called when the store is lost.
        self.on_lost: Callable[[], None] | None = None

    @property
    def names(self) -> list[str]:
        """The host's address as this node knows it, and as the connection has it: to another node,
        a name may mean another machine, or an address may be out of reach."""
        return [*dict.fromkeys([str(self.place), *self._reached_at])]

    @classmethod
    async def connect(
        cls,
        places: Sequence[Endpoint],
        *,
        timeout: float | None,
        term: int = 0,
        lease: tuple[str, float] | None = None,
        reconnect_timeout: float | None = None,
        clock: Clock | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        say: Callable[[str], None] = log.debug,
    ) -> EmbeddedStore:
        """Connect to the store of a job, waiting up to `timeout` seconds (None: forever) for it.

        The host must have at least `term`. `lease` (token, seconds) is a lease that should already
        be open there: see `has_lease`. Without an answer, `meanwhile` is called after every attempt
        and `say` from time to time with the reason. Raises `RendezvousLost` if no host answers in
        time, `RendezvousRefused` if the answer is not from our job's rendezvous.
        """
        clock = clock or SystemClock()
        store = cls(places[0], clock=clock, reconnect_timeout=reconnect_timeout)
        sent = clock.now()
        link, welcome, store.place = await connect_to_host(
            places,
            None if lease is None else lease[0],
            timeout=math.inf if timeout is None else timeout,
            clock=clock,
            term=term,
            meanwhile=meanwhile,
            say=say,
        )
        store._store_name, store.term = welcome.store, welcome.term
        if lease is not None and welcome.lease:
            store._keep_lease(*lease, sent)
        store._adopt(link)
        store._connector = asyncio.create_task(
            store._stay_connected(link), name="rendezvous connection"
        )
        store._connector.add_done_callback(store._disconnected)
        return store

    @property
    def local_addr(self) -> str:
        """This node's address on the route to the store; its peers can reach it there."""
        return self._local_addr

    @property
    def has_lease(self) -> bool:
        return self._held() is not None

    @property
    def loss(self) -> str:
        """The reason why the store is lost; empty while it is not."""
        return self._lost or ""

    def lose(self, sentence: str) -> None:
        """End the connection for good, for this reason."""
        if self._lost is None:
            self._lose(sentence)
        if self._link is not None:
            self._link.abort()

    # The verbs

    async def get(self, prefix: str) -> Listing:
        request = await self._ask(lambda id: frames.Get(id, prefix))
        answer = request.answer.result()
        assert isinstance(answer, frames.Rows)
        return Listing(answer.revision, {row.key: _item(row) for row in request.rows})

    async def put(self, key: str, value: Json, *, leased: bool = False) -> int:
        revision = await self._write(key, value, leased=leased)
        assert revision is not None
        return revision

    async def report(self, key: str, value: Json) -> None:
        text = frames.encode_value(key, value)
        self._check()
        self._need_lease(key)
        id = next(self._ids)
        frame = frames.pack(frames.Report(id, key, text))
        self._reports[key] = id, frame
        if self._link is not None:
            self._link.send(frame)

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
        return await self._write(
            key, value, expected=expected, leased=leased, beside=beside, provided=provided
        )

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        async with contextlib.aclosing(self._rows_of(WatchQueue(prefix, after))) as rows:
            async for row in rows:
                yield _change(row)

    async def follow(self, key: str) -> AsyncGenerator[Item | None, None]:
        async with contextlib.aclosing(self._rows_of(WatchQueue(key, None, one_key=True))) as rows:
            async for row in rows:
                yield _change(row).item

    async def latest(self, key: str) -> Item | None:
        self._check()
        if key not in self._memos:
            self._forget_memos()
            self._memos[key] = memo = Memo(key)
            self._watch_queues.append(memo)
            self._subscribe(memo)
        return _change(await self._memos[key].latest()).item

    def _forget_memos(self) -> None:
        """Stop watching the keys read earlier, unless a caller waits for one."""
        for memo in [memo for memo in self._memos.values() if memo.live]:
            del self._memos[memo.prefix]
            self._drop(memo)

    async def _rows_of(self, queue: WatchQueue) -> AsyncGenerator[Row, None]:
        self._check()
        self._watch_queues.append(queue)
        self._subscribe(queue)
        try:
            while True:
                yield await queue.next()
        finally:
            self._drop(queue)

    async def keep_alive(self) -> bool:
        self._check()
        lease = self._held()
        if lease is None:
            return False
        sent = self._clock.now()
        request = await self._ask(frames.KeepAlive)
        if isinstance(request.answer.result(), frames.NoLease):
            lease.end()
        else:
            lease.renewed(sent)
        return lease.is_held

    def tell_lease(self, tell: Callable[[float], None]) -> None:
        self._tell_lease = tell
        if (lease := self._held()) is not None:
            tell(lease.until)

    async def resume_lease(self, seconds: float) -> bool:
        self._check()
        if self._lease is None:
            return False
        sent = self._clock.now()
        request = await self._ask(frames.KeepAlive)
        if isinstance(request.answer.result(), frames.NoLease):
            return False
        self._keep_lease(self._lease.id, seconds, sent)
        return True

    async def open_lease(self, seconds: float) -> None:
        token = secrets.token_hex(16)
        sent = self._clock.now()
        await self._ask(lambda id: frames.OpenLease(id, token, seconds))
        # No await from here on: a connection lost meanwhile would not resume this lease.
        self._keep_lease(token, seconds, sent)

    def _keep_lease(self, token: str, seconds: float, sent: float) -> None:
        self._stop_renewing()
        self._lease = HeldLease(
            token,
            seconds=seconds,
            standstill=seconds,
            sent=sent,
            clock=self._clock,
            lost=self.lease_lost,
            on_until=lambda until: self._tell_lease(until),
        )
        if self._given_timeout is None:
            self._loss_timeout = seconds
        renewing = self._lease.keep(self.keep_alive, seconds / RENEWALS_PER_LEASE)
        self._keeper = asyncio.create_task(renewing, name="rendezvous lease")

    async def give_up(
        self, key: str, *, created: int, provided: tuple[str, int] | None = None
    ) -> None:
        await self._ask(lambda id: frames.GiveUp(id, key, created, provided))

    async def close(self) -> None:
        self._stop_renewing()
        if self._lost is None:
            self._lose("This connection to the rendezvous was closed.")
        tasks = [task for task in (self._keeper, self._connector) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if (link := self._link) is not None:
            link.send(frames.Bye())
            try:
                await asyncio.wait([link.ended], timeout=GOODBYE_TIMEOUT)
            finally:
                link.abort()
            await asyncio.wait([link.ended])
            self._link = None

    # Requests and answers

    async def _write(
        self,
        key: str,
        value: Json,
        *,
        leased: bool,
        expected: int | None = None,
        beside: Mapping[str, Json] | None = None,
        provided: tuple[str, int] | None = None,
    ) -> int | None:
        text = frames.encode_value(key, value)
        texts = {name: frames.encode_value(name, other) for name, other in (beside or {}).items()}
        self._check()
        lease = self._need_lease(key) if leased else self._held()
        request = await self._ask(
            lambda id: frames.Put(
                id, key, text, f"{self._name}/{id}", expected, leased, texts, provided
            )
        )
        answer = request.answer.result()
        if isinstance(answer, frames.NoLease):
            if lease is not None:
                lease.end()
            raise LeaseExpired(f"The rendezvous dropped this node: '{key}' was not written.")
        assert isinstance(answer, frames.Done)
        return answer.revision

    async def _ask(self, make: Callable[[int], frames.Message]) -> _Request:
        """Send a request, now or after reconnecting, and wait for its answer."""
        self._check()
        id = next(self._ids)
        request = _Request(frames.pack(make(id)))
        if not self._requests:
            self._asked_at = self._loop.time()
        self._requests[id] = request
        if self._link is not None:
            self._link.send(request.frame)
            self._expect_answer()
        try:
            await request.answer
        finally:
            self._requests.pop(id, None)
        return request

    def _check(self) -> None:
        """Check that the store and, if needed, the lease still exist."""
        self._check_lease()
        if self._lost is not None:
            raise RendezvousLost(self._lost)

    def _hear(self, payload: bytes) -> None:
        self._heard_at = self._loop.time()
        # First: after a freeze of this process, what is read now is old, and the lease may have
        # ended.
        self._check_lease()
        message = frames.parse(payload, frames.ANSWERS)
        match message:
            case frames.Changed(prefix=prefix, rows=rows):
                for queue in self._watch_queues:
                    if queue.live and queue.prefix == prefix:
                        queue.take(rows)
            case frames.LeaseEnded(token=token):
                if self._lease is not None and self._lease.id == token:
                    self._lease.end()
            case frames.Refusal(line=line):
                self._lose(f"The rendezvous at {self.place} ended the connection: {line}")
            case frames.NoLease(id=id) if id not in self._requests:
                if self._lease is not None:  # a report was rejected
                    self._lease.end()
            case frames.Rows() | frames.Done() | frames.NoLease():
                self._answered(message)

    def _answered(self, message: frames.Rows | frames.Done | frames.NoLease) -> None:
        for key in [key for key, (id, _) in self._reports.items() if id < message.id]:
            del self._reports[key]  # sent before the answered request, so it arrived
        last = not isinstance(message, frames.Rows) or message.last
        if isinstance(message, frames.Rows) and (queue := self._catching_up.get(message.id)):
            queue.take(message.rows)
            if last:
                queue.begin(message.revision)
                del self._catching_up[message.id]
        elif request := self._requests.get(message.id):
            if isinstance(message, frames.Rows):
                request.rows += message.rows
            if last and not request.answer.done():
                request.answer.set_result(message)

    # Watches

    def _subscribe(self, queue: WatchQueue) -> None:
        queue.live = False
        if self._link is not None:
            id = next(self._ids)
            self._catching_up[id] = queue
            self._link.send(frames.Watch(id, queue.prefix, queue.seen))

    def _drop(self, queue: WatchQueue) -> None:
        self._watch_queues.remove(queue)
        for id in [id for id, waiting in self._catching_up.items() if waiting is queue]:
            del self._catching_up[id]
        shared = any(other.prefix == queue.prefix for other in self._watch_queues)
        if self._link is not None and not shared:
            self._link.send(frames.Unwatch(queue.prefix))

    # The connection

    def _adopt(self, link: Link) -> None:
        """Continue on a new connection where the last one ended."""
        self._link = link
        self._heard_at = self._loop.time()
        self._local_addr = reachable_address(link.local_addr, self.place.host)
        if link.remote_addr and can_be_told(link.remote_addr):
            self._reached_at = [format_endpoint(link.remote_addr, self.place.port)]
        link.deliver_to(self._hear)
        self._catching_up.clear()
        for _, frame in self._reports.values():
            link.send(frame)  # first: the answer to a later request shows that these arrived
        for queue in self._watch_queues:
            self._subscribe(queue)
        for request in self._requests.values():
            request.rows.clear()
            link.send(request.frame)
        self._expect_answer()

    async def _stay_connected(self, link: Link) -> None:
        """Reconnect whenever the connection is lost; give up when that takes too long."""
        while True:
            error = await asyncio.shield(link.ended)
            self._link = None
            if self._lost is not None:
                return
            if isinstance(error, WireError):
                # A retry would give the same result.
                self._lose(
                    f"The rendezvous at {self.place} sent something this node cannot read: {error}"
                )
                return
            # Not for users: it is restored in a moment, or another message reports the loss.
            log.debug("The connection to the rendezvous was lost (%s).", error or "closed")
            try:
                link = await self._reconnect(was_silent=isinstance(error, _Silence))
            except RendezvousLost as problem:
                self._lose(str(problem))
                return
            except RendezvousError as problem:
                self._lose(f"The rendezvous at {self.place} is gone: {problem}")
                return

    def _disconnected(self, connector: asyncio.Task[None]) -> None:
        """Fail all waiting verbs if reconnecting ended, for whatever reason."""
        if not connector.cancelled() and (bug := connector.exception()) is not None:
            log.error("Reconnecting to the rendezvous failed.", exc_info=bug)
            self._lose(f"The rendezvous at {self.place} is lost: {bug!r}.")

    async def _reconnect(self, *, was_silent: bool) -> Link:
        lease = self._held()
        token = None if lease is None else lease.id
        # Do not delay a successor once the host is probably gone: it was silent for long, or its
        # port refuses connections.
        hurry = FAILOVER_RECONNECT_TIMEOUT if self.term else self._loss_timeout
        link, welcome, _ = await connect_to_host(
            [self.place],
            token,
            timeout=min(hurry, self._loss_timeout) if was_silent else self._loss_timeout,
            refused=hurry,
            clock=self._clock,
            term=self.term,
            again=True,
        )
        if self._lost is not None:  # closed meanwhile; the cancellation may have been lost
            link.abort()
            raise RendezvousLost(self._lost)
        if welcome.store != self._store_name:
            link.abort()
            what = "has another host now" if self.term else "has forgotten this job"
            raise RendezvousLost(f"The rendezvous at {self.place} was restarted and {what}.")
        if lease is not None and not welcome.lease:
            lease.end()
        self._adopt(link)
        return link

    def _expect_answer(self) -> None:
        """While a request is unanswered, watch for a frozen host: its kernel still accepts what we
        send.

        Answers do not touch the timer, because they are many; the timer checks when it fires.
        """
        if self._requests and self._lost is None and self._silence_timer is None:
            self._silence_timer = self._loop.call_at(self._silence_deadline(), self._notice_silence)

    def _silence_deadline(self) -> float:
        # The unanswered renewal was sent a while after the last answered one: give the host up when
        # our lease ends, not later.
        share = 1 - 1 / RENEWALS_PER_LEASE if self.term else 1
        return max(self._asked_at, self._heard_at) + share * self._loss_timeout

    def _notice_silence(self) -> None:
        self._silence_timer = None
        if self._link is None:
            return  # the next connection sets it again
        if self._requests and self._loop.time() >= self._silence_deadline():
            self._link.abort(_Silence("no answer"))
        else:
            self._expect_answer()

    def _lose(self, sentence: str) -> None:
        """Fail every operation and every watch, now and later, with this reason."""
        self._lost = sentence
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_exception(RendezvousLost(sentence))
        for queue in self._watch_queues:
            queue.lose(sentence)
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        if self._lease is not None:
            self._lease.end()
        if self.on_lost is not None:
            self.on_lost()

    # The lease

    def _held(self) -> HeldLease | None:
        return self._lease if self._lease is not None and self._lease.is_held else None

    def _need_lease(self, key: str) -> HeldLease:
        if (lease := self._held()) is None:
            raise LeaseExpired(f"This node has no lease: '{key}' was not written.")
        return lease

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _stop_renewing(self) -> None:
        """Stop renewing the lease; it is returned, not lost."""
        if self._lease is not None:
            self._lease.give_back()
        if self._keeper is not None:
            self._keeper.cancel()


def _item(row: Row) -> Item:
    if row.text is None:
        raise WireError(f"The rendezvous lists '{row.key}' without a value.")
    return Item(frames.decode_value(row.text), row.created, row.modified)


def _change(row: Row) -> Change:
    item = None if row.text is None else _item(row)
    return Change(row.key, item, row.modified)


class WatchQueue:
    """The pending changes of one `watch`, or of one `follow`, which starts with the current
    value."""

    def __init__(self, prefix: str, after: int | None, *, one_key: bool = False) -> None:
        self.prefix = prefix
        self._one_key = one_key
        #: The revision of the last delivered change; None: nothing has been delivered.
        self.seen = after
        #: Whether the current rows have arrived; changes before that are out of order.
        self.live = False
        self._rows: deque[Row] = deque()
        #: Futures of callers that wait for a change.
        self._waiting: list[asyncio.Future[None]] = []
        self._lost: str | None = None

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            # After a reconnect the server may repeat changes that were in flight.
            is_news = self.seen is None or row.modified > self.seen
            if is_news and (row.key == self.prefix or not self._one_key):
                self.seen = row.modified
                self._rows.append(row)
                self._wake()

    def begin(self, revision: int) -> None:
        """Start: everything up to `revision` has been delivered."""
        self.live = True
        self._wake()
        if self.seen is None:
            self.take([Row(self.prefix, None, 0, revision)])  # the key is absent

    def lose(self, sentence: str) -> None:
        self._lost = sentence
        self._wake()

    async def next(self) -> Row:
        while not self._rows:
            await self._wait()
        return self._rows.popleft()

    async def _wait(self) -> None:
        if self._lost is not None:
            raise RendezvousLost(self._lost)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():  # done if its task was cancelled
                waiter.set_result(None)
        self._waiting.clear()


class Memo(WatchQueue):
    """A cached key that is read repeatedly: the server sends its changes."""

    def __init__(self, key: str) -> None:
        super().__init__(key, None, one_key=True)

    def take(self, rows: list[Row]) -> None:
        super().take(rows)
        while len(self._rows) > 1:
            self._rows.popleft()

    async def latest(self) -> Row:
        """The key as it is now, as far as this client can know."""
        while not self.live:
            await self._wait()
        return self._rows[-1]
