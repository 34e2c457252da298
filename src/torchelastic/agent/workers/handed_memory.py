"""Memory that workers have handed to their agent: the steps of their optimizers, and their metrics.

A worker that reports steps itself needs no counted ones; one that reports no metrics has no table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from torchelastic.metrics import metric_table
from torchelastic.worker import status_page


@dataclass(frozen=True)
class _Handed:
    descriptor: int
    #: The worker's generation and rank when it handed its memory over.
    place: tuple[int, int]
    #: Of a metric table: by name, the number of the last value that was read.
    numbers: dict[str, int] = field(default_factory=dict)


class HandedMemory:
    """The memory of each worker, by local rank."""

    def __init__(self) -> None:
        self._handed: dict[int, _Handed] = {}

    def handed(self, local_rank: int, place: tuple[int, int], descriptor: int) -> None:
        """Take over a worker's memory."""
        self.forget(local_rank)
        self._handed[local_rank] = _Handed(descriptor, place)

    def forget(self, local_rank: int) -> None:
        """Drop that of a worker that is gone or replaced, or does without it from now on."""
        known = self._handed.pop(local_rank, None)
        if known is not None:
            os.close(known.descriptor)

    def close(self) -> None:
        for local_rank in list(self._handed):
            self.forget(local_rank)


class CountedSteps(HandedMemory):
    """Optimizer steps of scripts that report none. They show progress; no worker is killed because
    of them."""

    def __init__(self) -> None:
        super().__init__()
        #: The newest generation in which a worker has taken a step.
        self.newest = -1

    def handed(self, local_rank: int, place: tuple[int, int], descriptor: int) -> None:
        """Take over the status page of a worker that has taken its first step."""
        super().handed(local_rank, place, descriptor)
        self.newest = max(self.newest, place[0])

    def shown(self) -> dict[int, status_page.ShownStatus]:
        """The status of each worker by local rank, as on the agent's own status pages."""
        looked = {local_rank: self._look(local_rank) for local_rank in self._handed}
        return {local_rank: one[0] for local_rank, one in looked.items() if one is not None}

    def seen(self, local_rank: int) -> tuple[int, int, float, int] | None:
        """Generation, step and time of the last step that was taken, and the first step."""
        if (found := self._look(local_rank)) is None:
            return None
        shown, first = found
        return shown.generation, shown.step, shown.at, first

    def _look(self, local_rank: int) -> tuple[status_page.ShownStatus, int] | None:
        if (known := self._handed.get(local_rank)) is None:
            return None
        generation, rank = known.place
        before = status_page.read_taken(known.descriptor)
        shown = status_page.read(known.descriptor)
        first = status_page.read_first_step(known.descriptor)
        if shown.step < 0:  # the worker has truncated its memory
            return None
        return replace(shown, generation=generation, rank=rank, before=before), first


@dataclass(frozen=True)
class Reported:
    """The metrics of one worker: the last value of each."""

    generation: int
    rank: int
    metrics: dict[str, float]
    #: Metrics with a new value since the last look.
    fresh: frozenset[str]


class MetricTables(HandedMemory):
    """The metric tables of this node's workers, and the new values in them."""

    def look(self, stepped: dict[int, tuple[int, int]]) -> list[Reported]:
        """Return the metrics. `stepped` has the generation and rank of each worker's last step: an
        in-process worker goes from world to world."""
        found = []
        for local_rank, known in self._handed.items():
            rows = metric_table.read(known.descriptor)
            numbers = {row.name: row.number for row in rows}
            fresh = frozenset(dict(numbers.items() - known.numbers.items()))
            known.numbers.update(numbers)  # a row that was being written keeps its number
            place = max(known.place, stepped.get(local_rank, known.place))
            found.append(Reported(*place, {row.name: row.value for row in rows}, fresh))
        return found
