"""The leader's end of the story: it takes the lines of all agents and writes them to one file.

    agent                                    leader
    begin: who it is                    ->
                                        <-   heard: up to where it has that agent's lines
    lines: from there on, a portion     ->
                                        <-   heard, once they are written
    lines ...

An agent has one portion on its way at a time, so what waits here is bounded; and so many are taken
at a time only that gathering never keeps the leader from leading. `shipper` is the other end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torchelastic.agent.telemetry.clock_offset import BATCH, LONGEST_LINE
from torchelastic.agent.telemetry.collected_log import CollectedLog
from torchelastic.best_effort import observing
from torchelastic.clock import Clock
from torchelastic.errors import WireError
from torchelastic.transport import frames
from torchelastic.transport.frames import Message, by_kind
from torchelastic.transport.link import Link

logger = logging.getLogger(__name__)

#: Seconds between two writes, and portions written at a time.
PAUSE, PORTIONS = 0.1, 64
#: Agents that are listened to.
MOST_VISITORS = 8192
#: Nothing is known of an agent.
NOTHING = -1.0
#: Seconds that the last lines have to be written, when this node goes.
LAST_WRITE = 2.0


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Who speaks."""

    kind = "begin"
    node: str


@dataclass(frozen=True, slots=True)
class Lines(Message):
    """Lines of an agent's log, which follow in the same frame."""

    kind = "lines"
    #: The time of the last, by the agent's clock.
    upto: float


@dataclass(frozen=True, slots=True)
class Heard(Message):
    """Answers both: what the leader has."""

    kind = "heard"
    #: Up to which time, by the agent's clock.
    upto: float
    #: When what is answered came, by the leader's clock.
    at: float


SAID = by_kind(Begin, Lines)
ANSWERS = by_kind(Heard)


@dataclass
class _Portion:
    """Lines that wait to be written, and who waits for that."""

    lines: bytes
    written: asyncio.Future[None]


@dataclass(eq=False)
class _Visitor:
    """An agent that tells."""

    link: Link
    node: str = ""
    #: It has a portion on its way.
    waits: bool = False


class LogCollector:
    """What this node has gathered. Any node takes what it is told; whoever leads is told."""

    def __init__(self, log: CollectedLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        #: By node: up to where its lines are here.
        self._has: dict[str, float] = {}
        self._portions: deque[_Portion] = deque()
        self._visitors: set[_Visitor] = set()
        self._writing: asyncio.Task[None] | None = None
        self._closing = False
        self._listeners: list[Callable[[bytes], None]] = []

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Hand on the lines of every node, as they come. The listener must not wait."""
        self._listeners.append(listener)

    # --- who tells -------------------------------------------------------------------------------

    def admit(self, link: Link, hello: frames.Hello) -> None:
        """Take a connection from the reception."""
        if self._closing or len(self._visitors) >= MOST_VISITORS:
            link.send(frames.Refusal("This agent accepts no more event connections."))
            link.close()
            return
        visitor = _Visitor(link)
        self._visitors.add(visitor)
        link.ended.add_done_callback(lambda _: self._visitors.discard(visitor))
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
        link.deliver_to(partial(self._hear, visitor))

    def _hear(self, visitor: _Visitor, payload: bytes) -> None:
        at = self._clock.now()
        head, _, rest = payload.partition(b"\n")
        match frames.parse(head, SAID):
            case Begin(node):
                visitor.node = node
                visitor.link.send(Heard(self.upto(node), at))
            case Lines(upto):
                self._check(visitor, upto, rest)
                visitor.waits = True
                written = self.take(visitor.node, rest, upto)
                written.add_done_callback(lambda _: self._answer(visitor, upto, at))

    def _check(self, visitor: _Visitor, upto: float, lines: bytes) -> None:
        if not visitor.node or visitor.waits:
            raise WireError("An agent sent events out of turn.")
        if len(lines) > BATCH + LONGEST_LINE or not lines.endswith(b"\n"):
            raise WireError("An agent sent an invalid or oversized batch of events.")
        if not math.isfinite(upto):
            raise WireError("An agent sent events without a time.")

    def _answer(self, visitor: _Visitor, upto: float, at: float) -> None:
        visitor.waits = False
        visitor.link.send(Heard(upto, at))

    async def wait_alone(self, seconds: float) -> None:
        """Give those who are telling some time to come to their end."""
        if shipper := [visitor.link.ended for visitor in self._visitors]:
            await asyncio.wait(shipper, timeout=seconds)

    # --- what is told ----------------------------------------------------------------------------

    def upto(self, node: str) -> float:
        """Up to which time, by its clock, a node's lines are here."""
        return self._has.get(node, NOTHING)

    def take(self, node: str, lines: bytes, upto: float) -> asyncio.Future[None]:
        """Have lines written; done when they are, or when they cannot be."""
        self._has[node] = max(self.upto(node), upto)
        for listener in self._listeners:
            with observing("Processing collected events"):
                listener(lines)
        portion = _Portion(lines, asyncio.get_running_loop().create_future())
        self._portions.append(portion)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="gather")
            self._writing.add_done_callback(self._wrote)
        return portion.written

    async def _write(self) -> None:
        """Write what waits, in a thread: a disk may be slow."""
        try:
            while self._portions:
                if not self._closing:
                    await asyncio.sleep(PAUSE)
                count = min(PORTIONS, len(self._portions))
                taken = [self._portions.popleft() for _ in range(count)]
                try:
                    await asyncio.to_thread(self._log.write, b"".join(one.lines for one in taken))
                finally:  # who waits for this would tell nothing more
                    for one in taken:
                        if not one.written.done():
                            one.written.set_result(None)
        finally:
            # Here, and not when the task is seen to be done: what is taken between the two would
            # wait for a writer that has ended.
            self._writing = None

    def _wrote(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (bug := writing.exception()) is not None:
            logger.error("Could not write collected events.", exc_info=bug)

    async def close(self) -> None:
        """Write what is here, and take nothing more."""
        self._closing = True
        for visitor in list(self._visitors):
            visitor.link.abort()
        if self._writing is not None:
            done, _ = await asyncio.wait({self._writing}, timeout=LAST_WRITE)
            if not done:
                return  # the disk hangs, and the thread with it: it still has the file
        self._log.close()
