"""What this node's workers report: the boards they have handed over, and what is new on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchelastic.metrics import metric_table


@dataclass(frozen=True)
class Reported:
    """What one worker reports: the last value of each metric."""

    generation: int
    rank: int
    metrics: dict[str, float]
    #: Those of which there was a new value since the last look.
    fresh: frozenset[str]


@dataclass
class _Handed:
    descriptor: int
    #: The generation and the rank that the worker had when it reported something first.
    place: tuple[int, int]
    #: By name, which value was read last.
    numbers: dict[str, int] = field(default_factory=dict)


class MetricTables:
    """By local rank. A worker that reports nothing has none."""

    def __init__(self) -> None:
        self._handed: dict[int, _Handed] = {}

    def handed(self, local_rank: int, place: tuple[int, int], descriptor: int) -> None:
        """A worker has handed over its board."""
        self.ended(local_rank)
        self._handed[local_rank] = _Handed(descriptor, place)

    def ended(self, local_rank: int) -> None:
        """The worker is gone: what it has reported was looked at before."""
        known = self._handed.pop(local_rank, None)
        if known is not None:
            os.close(known.descriptor)

    def close(self) -> None:
        for local_rank in list(self._handed):
            self.ended(local_rank)

    def look(self, stepped: dict[int, tuple[int, int]]) -> list[Reported]:
        """What is reported. `stepped` has the generation and the rank in which workers have entered
        a step last: a resident one goes on from world to world."""
        found = []
        for local_rank, known in self._handed.items():
            rows = metric_table.read(known.descriptor)
            numbers = {row.name: row.number for row in rows}
            fresh = frozenset(dict(numbers.items() - known.numbers.items()))
            known.numbers.update(numbers)  # a row that was being written keeps its number
            place = max(known.place, stepped.get(local_rank, known.place))
            found.append(Reported(*place, {row.name: row.value for row in rows}, fresh))
        return found
