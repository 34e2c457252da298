"""The metric tables of this node's workers, and the new values in them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchelastic.metrics import metric_table


@dataclass(frozen=True)
class Reported:
    """The metrics of one worker: the last value of each."""

    generation: int
    rank: int
    metrics: dict[str, float]
    #: Metrics with a new value since the last look.
    fresh: frozenset[str]


@dataclass
class _Handed:
    descriptor: int
    #: The worker's generation and rank at its first report.
    place: tuple[int, int]
    #: By name, the number of the last value that was read.
    numbers: dict[str, int] = field(default_factory=dict)


class MetricTables:
    """Metric tables by local rank. A worker that reports nothing has none."""

    def __init__(self) -> None:
        self._handed: dict[int, _Handed] = {}

    def handed(self, local_rank: int, place: tuple[int, int], descriptor: int) -> None:
        """Take over a worker's metric table."""
        self.ended(local_rank)
        self._handed[local_rank] = _Handed(descriptor, place)

    def ended(self, local_rank: int) -> None:
        """Drop the table of a worker that has exited, after the last look."""
        known = self._handed.pop(local_rank, None)
        if known is not None:
            os.close(known.descriptor)

    def close(self) -> None:
        for local_rank in list(self._handed):
            self.ended(local_rank)

    def look(self, stepped: dict[int, tuple[int, int]]) -> list[Reported]:
        """Return the metrics. `stepped` has the generation and rank of each worker's last step: a
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
