"""The leader's eye on who is slow: what all nodes tell goes in, what is said and done comes out.

Every agent has one; it sees something where the lines of all nodes come together (`collector`), or,
in a job of one node, where that node's events do. Who is slow is for `events.stragglers` to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set

from torchelastic.best_effort import observing
from torchelastic.events.analysis.stragglers import Finding, Stragglers
from torchelastic.events.log import EventLog
from torchelastic.events.record import Record
from torchelastic.events.types import Joined, Progress, Straggler

#: How a line begins that has something to say here: with its type, after its version.
_BEGINNING = 48
_TYPES = tuple(f'"type":"{event.type}"'.encode() for event in (Progress, Joined))


class StragglerWatch:
    """Of one generation after the other."""

    def __init__(
        self,
        threshold: float,
        say: Callable[[int, Sequence[Straggler]], None],
        replace: Callable[[int, Set[str]], None] | None,
    ) -> None:
        """`say` is told of a generation's stragglers, `replace` of the nodes that have any."""
        self._stragglers = Stragglers(threshold)
        self._say, self._replace = say, replace
        #: Names of nodes by the ids of their agents.
        self._names: dict[str, str] = {}

    def turn_to(self, generation: int, size: int) -> None:
        """A world begins, with so many workers."""
        if generation > self._stragglers.generation:
            self._stragglers.turn_to(generation, size)

    def sum_up(self, before: int) -> None:
        """Generations before this one are over: say what the stragglers of the last have cost in
        all, if it is more than was said. Once: a job may wait for hours, and says that again."""
        generation = self._stragglers.generation
        if generation < before:
            self._tell(generation, self._stragglers.sum_up())

    def follow(self, log: EventLog) -> None:
        """In a job of one node its own log is the whole story."""
        loop = asyncio.get_running_loop()

        def take(record: Record) -> None:
            with observing("Looking for stragglers"):
                self._take(record)

        def later(record: Record) -> None:
            loop.call_soon(take, record)  # what is said of it comes behind it in the log

        log.listen(later)

    def heard(self, lines: bytes) -> None:
        """Lines of a node's log, as the leader gathers them."""
        for line in lines.splitlines():
            beginning = line[:_BEGINNING]
            if any(kind in beginning for kind in _TYPES) and (record := Record.parse(line)):
                self._take(record)

    def _take(self, record: Record) -> None:
        match record.event:
            case Joined(name=name):
                self._names[record.node] = name
            case Progress() as progress if record.generation is not None:
                self._look(record.generation, record.node, progress)

    def _look(self, generation: int, node: str, progress: Progress) -> None:
        findings = self._stragglers.feed(generation, node, progress)
        if not findings:
            return
        self._tell(generation, findings)
        if self._replace is not None:
            named = self._stragglers.named.values()
            self._replace(generation, {finding.node for finding in named})

    def _tell(self, generation: int, findings: Sequence[Finding]) -> None:
        if findings:
            named = [one.event(self._names.get(one.node, one.node)) for one in findings]
            self._say(generation, named)
