"""The events of the whole job, on the node that has them: the leader, which collects those of all
nodes (`collector`), or the only node of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchelastic.best_effort import observing
from torchelastic.events.log import EventLog
from torchelastic.events.record import Record
from torchelastic.events.types import Joined, Progress, StepSkipped

#: Relevant lines have one of these types near their beginning, after the version.
_BEGINNING = 48
_TYPES = tuple(f'"type":"{event.type}"'.encode() for event in (Progress, Joined, StepSkipped))


class JobEvents:
    """Passes events to listeners as they come, except on nodes that know only their own."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Record], None]] = []

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Pass nodes that join, progress and bad steps to `listener`. It must not block."""
        self._listeners.append(listener)

    def follow(self, log: EventLog) -> None:
        """Follow the log of the only node."""
        loop = asyncio.get_running_loop()

        def later(record: Record) -> None:
            loop.call_soon(self._take, record)  # so that what a listener reports follows in the log

        log.listen(later)

    def take_lines(self, lines: bytes) -> None:
        """Take lines of a node's log, as the leader collects them."""
        for line in lines.splitlines():
            beginning = line[:_BEGINNING]
            if any(kind in beginning for kind in _TYPES) and (record := Record.parse(line)):
                self._take(record)

    def _take(self, record: Record) -> None:
        for listener in self._listeners:
            with observing("Looking at the events of the job"):
                listener(record)
