"""The straggler watch: reads the events of all nodes, reports stragglers and has them replaced.

Every agent has one; it gets events where those of the whole job are (`job_events`).
`events.analysis.stragglers` decides which rank is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from torchelastic.events.analysis.stragglers import StragglerReport, Stragglers
from torchelastic.events.record import Record
from torchelastic.events.types import Joined, Progress, Straggler


class StragglerWatch:
    """Watches one generation after the other."""

    def __init__(
        self,
        threshold: float,
        say: Callable[[int, Sequence[Straggler]], None],
        replace: Callable[[int, Set[str]], None] | None,
    ) -> None:
        """`say` receives a generation's stragglers, `replace` the nodes that have any."""
        self._stragglers = Stragglers(threshold)
        self._say, self._replace = say, replace
        #: Names of nodes by the ids of their agents.
        self._names: dict[str, str] = {}

    def turn_to(self, generation: int, size: int) -> None:
        """Start of a world of `size` workers."""
        if generation > self._stragglers.generation:
            self._stragglers.turn_to(generation, size)

    def sum_up(self, before: int) -> None:
        """Report the total cost of the stragglers in generations before `before`, once, if it is
        more than was reported."""
        generation = self._stragglers.generation
        if generation < before:
            self._tell(generation, self._stragglers.sum_up())

    def take(self, record: Record) -> None:
        """Take one more event of the job (`job_events`)."""
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

    def _tell(self, generation: int, findings: Sequence[StragglerReport]) -> None:
        if findings:
            named = [one.event(self._names.get(one.node, one.node)) for one in findings]
            self._say(generation, named)
