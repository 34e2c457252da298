"""The log shipper: sends this node's events to the leader, which collects those of the whole job.

Events are written to this node's own log first and shipped later, in batches: the leader may be
slow, frozen, gone or replaced, and nothing here waits for it. Recent events are kept in memory; a
leader that lacks older ones gets them from the file.

    a world begins, and its host is another one; or the connection ends
        ->  look who leads  ->  another one: begin again there
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from torchelastic.agent.telemetry.clock_offset import SPREAD, Offset, linger, next_batch
from torchelastic.agent.telemetry.collector import (
    ANSWERS,
    NOTHING,
    Begin,
    Heard,
    Lines,
    LogCollector,
)
from torchelastic.best_effort import observing
from torchelastic.clock import Clock
from torchelastic.errors import ConfigError, RendezvousError
from torchelastic.events.log import EventLog, read
from torchelastic.events.record import Record
from torchelastic.rendezvous.membership.backend import RendezvousBackend
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX
from torchelastic.side_tasks import keep_up
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once
from torchelastic.transport.link import Link

logger = logging.getLogger(__name__)

#: Records kept in memory, and read from the file at a time.
RECENT = 256
#: Seconds after the start of a world, and more per node, before shipping: workers come first.
SETTLING, SETTLING_MORE = 1.0, 0.002
#: Seconds after which a node looks for a new leader anyway, and after shipping failed.
LOOK_AGAIN, TRY_AGAIN = 60.0, 2.0
#: Seconds the leader has to answer a connection, and to take a batch: all nodes may send at once.
CONNECT_TIMEOUT, BATCH_TIMEOUT = 5.0, 60.0
#: Clock measurements before the first batch, whose times are not corrected later.
CLOCK_SAMPLES = 4
_NOT_REACHED = (OSError, EOFError, asyncio.TimeoutError, NoAnswer, RendezvousError, ConfigError)


class EventReceiver(Protocol):
    """The receiver of events."""

    async def begin(self) -> Heard: ...

    async def take(self, lines: bytes, upto: float) -> Heard: ...

    @property
    def ended(self) -> asyncio.Future[Exception | None]:
        """Done when it takes no more."""
        ...


class LocalSink:
    """The sink when this node leads."""

    def __init__(self, collector: LogCollector, node: str, clock: Clock) -> None:
        self._collector, self._node, self._clock = collector, node, clock
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def begin(self) -> Heard:
        return Heard(self._collector.upto(self._node), self._clock.now())

    async def take(self, lines: bytes, upto: float) -> Heard:
        at = self._clock.now()
        await self._collector.take(self._node, lines, upto)
        return Heard(upto, at)


class RemoteSink:
    """The sink when another node leads: a connection to it."""

    def __init__(self, link: Link, node: str) -> None:
        self._link, self._node = link, node
        self.ended = link.ended

    async def begin(self) -> Heard:
        self._link.send(Begin(self._node))
        return await self._answer()

    async def take(self, lines: bytes, upto: float) -> Heard:
        self._link.send(frames.pack_before(Lines(upto), lines))
        return await self._answer()

    async def _answer(self) -> Heard:
        # Not `wait_for`, which before Python 3.12 may lose a cancellation.
        frame = self._link.next_frame()
        done, _ = await asyncio.wait({frame}, timeout=BATCH_TIMEOUT)
        if not done:
            raise TimeoutError("The leader does not accept events.")
        return frames.parse(frame.result(), ANSWERS)


@dataclass(frozen=True)
class LeaderAddress:
    """The leading node, its agent's address and its name."""

    node: str = ""
    peer: str = ""
    name: str = ""


class LogShipper:
    """Ships events. Create it before the first event; `open` it once this node has joined."""

    def __init__(
        self,
        log: EventLog,
        node: str,
        job: str,
        collector: LogCollector,
        clock: Clock,
        *,
        on_leader: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._node, self._job, self._clock = node, job, clock
        self._path = log.path
        self._on_leader = on_leader
        self._collector = collector
        self._recent: deque[Record] = deque(maxlen=RECENT)
        #: The time of the last record that is only in the file.
        self._floor = float("-inf")
        self._backend: RendezvousBackend | None = None
        #: Nodes of the world; 0 before the first.
        self._nodes = 0
        #: The leader, and the task that ships to it.
        self._leader = LeaderAddress()
        self._talk: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        #: A world has begun; there are records to ship; all are shipped; ship without delay.
        self._turned = asyncio.Event()
        self._news = asyncio.Event()
        self._told = asyncio.Event()
        self._hurry = asyncio.Event()
        log.listen(self._happened)

    def _happened(self, record: Record) -> None:
        if len(self._recent) == RECENT:
            self._floor = self._recent[0].mono
        self._recent.append(record)
        self._told.clear()
        self._news.set()

    @property
    def leads(self) -> bool | None:
        """True if this node collects the events; None: it does not know who leads."""
        return self._leader.node == self._node if self._leader.node else None

    def open(self, backend: RendezvousBackend) -> None:
        """Collect events of other nodes, and look for the leader when there is a world."""
        self._backend = backend
        backend.serve(frames.EVENTS, self._collector.admit)
        self._looking = self._start(keep_up(self._look, "event-shipping", logger.warning))

    def turn_to(self, nodes: int, host: str = "") -> None:
        """Start of a world of `nodes` nodes; `host` has the store and leads, if that is known.

        Then no node asks for the leader: thousands would, while it forms a world.
        """
        self._nodes = max(nodes, 1)
        if not (host and host == self._leader.node and self._is_shipping):
            self._turned.set()

    async def last_words(self, seconds: float) -> None:
        """Ship the rest before this node ends, within `seconds`."""
        if self._looking is not None and self._nodes:
            self._hurry.set()
            await _first_of(seconds, self._told.wait(), self._looking)

    async def close(self) -> None:
        """Ship nothing more."""
        for task in (self._looking, self._talk):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    # --- whom ------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Find the leader whenever it may have changed, and ship to it."""
        while True:
            await self._until_it_is_time()
            leader = await self._find()
            if leader is not None and (leader != self._leader or not self._is_shipping):
                await self._turn_to_leader(leader)
            if self._hurry.is_set():
                if self._talk is not None:
                    await asyncio.wait({self._talk})
                return

    async def _until_it_is_time(self) -> None:
        limit = LOOK_AGAIN if self._is_shipping else TRY_AGAIN
        talk = [self._talk] if self._talk is not None and self._is_shipping else []
        await _first_of(
            limit if self._nodes else None, self._turned.wait(), self._hurry.wait(), *talk
        )
        self._turned.clear()
        pause = SETTLING + self._nodes * random.uniform(SETTLING_MORE, SETTLING_MORE + SPREAD)
        await _first_of(pause, self._hurry.wait())

    @property
    def _is_shipping(self) -> bool:
        return self._talk is not None and not self._talk.done()

    async def _find(self) -> LeaderAddress | None:
        """The leader; None if there is none."""
        assert self._backend is not None
        try:
            node = str((await self._stored(LEADER_KEY)).get("node", ""))
            member = await self._stored(MEMBER_PREFIX + node) if node else {}
        except RendezvousError as error:
            logger.debug("cannot find the leader: %s", error)
            return None
        leader = LeaderAddress(node, str(member.get("peer", "")), str(member.get("name", "")))
        return leader if leader.peer else None

    async def _stored(self, key: str) -> Mapping[str, Any]:
        """The value in the store; empty if there is none."""
        assert self._backend is not None
        item = (await self._backend.store.get(key)).items.get(key)
        return item.value if item is not None else {}

    async def _turn_to_leader(self, leader: LeaderAddress) -> None:
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.wait({self._talk})
        if leader.node not in (self._node, self._leader.node):
            self._on_leader(leader.name)
        self._leader = leader
        self._talk = self._start(self._ship_to(leader.node, leader.peer))

    # --- what ------------------------------------------------------------------------------------

    async def _ship_to(self, node: str, peer: str) -> None:
        """Ship a leader everything it lacks, as long as it takes it."""
        try:
            if node == self._node:
                await self._ship(LocalSink(self._collector, node, self._clock), leads=True)
                return
            link = await self._call(peer)
            try:
                await self._ship(RemoteSink(link, self._node), leads=False)
            finally:
                link.abort()
        except _NOT_REACHED as error:
            logger.debug("cannot ship events to the leader at %s: %r", peer, error)
        except Exception as error:  # `_look` begins again
            with observing("Shipping events to the leader"):
                raise error

    async def _call(self, peer: str) -> Link:
        assert self._backend is not None
        place = Endpoint.at(peer, self._job, self._backend.credentials)
        link, answer = await connect_once(place, purpose=frames.EVENTS, timeout=CONNECT_TIMEOUT)
        if not isinstance(answer, frames.Welcome):
            link.abort()
            raise ConnectionError("the peer did not answer as a torchelastic agent")
        return link

    async def _ship(self, sink: EventReceiver, *, leads: bool) -> None:
        offset, upto = Offset(), NOTHING
        for _ in range(CLOCK_SAMPLES):
            sent = self._clock.now()
            answer = await sink.begin()
            offset.note(sent, answer.at)
            # A later time comes from the clock of an agent before this machine rebooted.
            upto = answer.upto if answer.upto <= sent else NOTHING
        while not sink.ended.done():
            self._news.clear()
            upto = await self._ship_rest(sink, offset, upto, leads=leads)
            if not self._news.is_set():
                self._told.set()
            await _first_of(None, self._news.wait(), sink.ended)
            await _first_of(linger(self._nodes), self._hurry.wait(), sink.ended)

    async def _ship_rest(
        self, sink: EventReceiver, offset: Offset, upto: float, *, leads: bool
    ) -> float:
        """Ship all records later than `upto`; return the time up to which all are shipped."""
        while upto < self._floor:
            since, floor = upto, self._floor
            behind = (record for record in read(self._path) if record.mono > since)
            while records := await asyncio.to_thread(_some, behind):
                upto = await self._ship_all(sink, offset, records, leads=leads)
            # Records that the file lacks (the disk was full) are lost.
            upto = max(upto, floor)
        while records := [record for record in self._recent if record.mono > upto]:
            upto = await self._ship_all(sink, offset, records, leads=leads)
        return upto

    async def _ship_all(
        self, sink: EventReceiver, offset: Offset, records: Sequence[Record], *, leads: bool
    ) -> float:
        upto = 0.0
        while records:
            upto, lines = next_batch(records, offset, self._nodes, leads=leads)
            if lines:
                sent = self._clock.now()
                answer = await sink.take(lines, upto)
                offset.note(sent, answer.at)
            records = [record for record in records if record.mono > upto]
        return upto

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="tell")
        task.add_done_callback(_ended)
        return task


def _some(records: Iterator[Record]) -> list[Record]:
    """The next records; none if the file cannot be read any further."""
    try:
        return list(islice(records, RECENT))
    except OSError as error:
        logger.debug("cannot read older events to ship: %s", error)
        return []


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()) is not None:
        logger.error("Shipping events to the leader has stopped.", exc_info=bug)


async def _first_of(seconds: float | None, *waited_for: Awaitable[object]) -> None:
    """Wait until one of them is done, at most `seconds`."""
    given = [one for one in waited_for if isinstance(one, asyncio.Future)]
    made = [asyncio.ensure_future(one) for one in waited_for if not isinstance(one, asyncio.Future)]
    try:
        await asyncio.wait({*given, *made}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in made:
            one.cancel()
