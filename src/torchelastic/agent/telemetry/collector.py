"""The log collector: the leader takes the events of all agents and writes them to one file.

    agent                                    leader
    begin: who it is                    ->
                                        <-   heard: up to where it has that agent's lines
    lines: from there on, a batch       ->
                                        <-   heard, once they are written
    lines ...

An agent has one batch on its way at a time, so the queue here is bounded; and few are written at a
time, so that collecting never keeps the leader from leading. `shipper` is the other end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchelastic.agent.telemetry.clock_offset import BATCH, LONGEST_LINE
from torchelastic.best_effort import observing
from torchelastic.clock import Clock
from torchelastic.errors import WireError
from torchelastic.events.rotation import AppendFile, rotate
from torchelastic.transport import frames
from torchelastic.transport.frames import Message, by_kind
from torchelastic.transport.link import Link

logger = logging.getLogger(__name__)

#: Seconds between two writes, and batches written at a time.
PAUSE, MOST_BATCHES = 0.1, 64
#: Connected agents.
MOST_AGENTS = 8192
#: Nothing is known of an agent.
NOTHING = -1.0
#: Seconds to write the last lines, when this node ends.
LAST_WRITE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Names the sender."""

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
    """Answers both: the lines the leader has."""

    kind = "heard"
    #: Up to which time, by the agent's clock.
    upto: float
    #: When the message arrived, by the leader's clock.
    at: float


REQUESTS = by_kind(Begin, Lines)
ANSWERS = by_kind(Heard)


@dataclass
class _Batch:
    """Lines that wait to be written, and the future that is done then."""

    lines: bytes
    written: asyncio.Future[None]


@dataclass(eq=False)
class _Agent:
    """A connected agent."""

    link: Link
    node: str = ""
    #: It has a batch on its way.
    waits: bool = False


class LogCollector:
    """Collects events. Every node can; agents send them to the leader."""

    def __init__(self, log: CollectedLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        #: By node: the time of its last line that is here.
        self._has: dict[str, float] = {}
        self._batches: deque[_Batch] = deque()
        self._agents: set[_Agent] = set()
        self._writing: asyncio.Task[None] | None = None
        self._closing = False
        self._listeners: list[Callable[[bytes], None]] = []

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Pass the lines of every node to `listener` as they come. It must not block."""
        self._listeners.append(listener)

    # --- who tells -------------------------------------------------------------------------------

    def admit(self, link: Link, hello: frames.Hello) -> None:
        """Take a connection from the listener."""
        if self._closing or len(self._agents) >= MOST_AGENTS:
            link.send(frames.Refusal("This agent accepts no more event connections."))
            link.close()
            return
        agent = _Agent(link)
        self._agents.add(agent)
        link.ended.add_done_callback(lambda _: self._agents.discard(agent))
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
        link.deliver_to(partial(self._hear, agent))

    def _hear(self, agent: _Agent, payload: bytes) -> None:
        at = self._clock.now()
        head, _, rest = payload.partition(b"\n")
        match frames.parse(head, REQUESTS):
            case Begin(node):
                agent.node = node
                agent.link.send(Heard(self.upto(node), at))
            case Lines(upto):
                self._check(agent, upto, rest)
                agent.waits = True
                written = self.take(agent.node, rest, upto)
                written.add_done_callback(lambda _: self._answer(agent, upto, at))

    def _check(self, agent: _Agent, upto: float, lines: bytes) -> None:
        if not agent.node or agent.waits:
            raise WireError("An agent sent events out of turn.")
        if len(lines) > BATCH + LONGEST_LINE or not lines.endswith(b"\n"):
            raise WireError("An agent sent an invalid or oversized batch of events.")
        if not math.isfinite(upto):
            raise WireError("An agent sent events without a time.")

    def _answer(self, agent: _Agent, upto: float, at: float) -> None:
        agent.waits = False
        agent.link.send(Heard(upto, at))

    async def wait_alone(self, seconds: float) -> None:
        """Wait until the connected agents have sent the rest, at most `seconds`."""
        if ended := [agent.link.ended for agent in self._agents]:
            await asyncio.wait(ended, timeout=seconds)

    # --- what is told ----------------------------------------------------------------------------

    def upto(self, node: str) -> float:
        """The time, by the node's clock, up to which its lines are here."""
        return self._has.get(node, NOTHING)

    def take(self, node: str, lines: bytes, upto: float) -> asyncio.Future[None]:
        """Queue lines; the future is done when they are written, or cannot be."""
        self._has[node] = max(self.upto(node), upto)
        for listener in self._listeners:
            with observing("Processing collected events"):
                listener(lines)
        batch = _Batch(lines, asyncio.get_running_loop().create_future())
        self._batches.append(batch)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="gather")
            self._writing.add_done_callback(self._wrote)
        return batch.written

    async def _write(self) -> None:
        """Write the queue, in a thread: a disk may be slow."""
        try:
            while self._batches:
                if not self._closing:
                    await asyncio.sleep(PAUSE)
                count = min(MOST_BATCHES, len(self._batches))
                taken = [self._batches.popleft() for _ in range(count)]
                try:
                    await asyncio.to_thread(self._log.write, b"".join(one.lines for one in taken))
                finally:  # the sender waits for this
                    for one in taken:
                        if not one.written.done():
                            one.written.set_result(None)
        finally:
            # Here, and not when the task is done: a batch taken in between would
            # wait for a writer that has ended.
            self._writing = None

    def _wrote(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (bug := writing.exception()) is not None:
            logger.error("Could not write collected events.", exc_info=bug)

    async def close(self) -> None:
        """Write the rest, and take nothing more."""
        self._closing = True
        for agent in list(self._agents):
            agent.link.abort()
        if self._writing is not None:
            done, _ = await asyncio.wait({self._writing}, timeout=LAST_WRITE_TIMEOUT)
            if not done:
                return  # the disk hangs, and the thread with it: it still has the file
        self._log.close()


# --- the file ------------------------------------------------------------------------------------


MAX_BYTES = 64 * 1024 * 1024
#: Bytes kept of the part before the last.
KEPT_BYTES = MAX_BYTES // 4


class CollectedLog:
    """The events of all agents in one file, rotated when it is full; important events are kept
    longest (`events.rotation`). Used by one thread at a time. A full disk costs lines, never the
    job."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.path = path
        #: Failed writes.
        self.dropped = 0
        self._max_bytes, self._kept_bytes = max_bytes, kept_bytes
        self._file = AppendFile(path)

    def write(self, lines: bytes) -> None:
        """Append whole lines."""
        try:
            self._file.append(lines)
            if self._file.size > self._max_bytes:
                self._file.close()
                rotate(self.path, self._kept_bytes)
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("Collected events are lost: cannot write %s (%s).", self.path, error)

    def close(self) -> None:
        self._file.close()
