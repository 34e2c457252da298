"""Numbers over a whole job: its step rate, and the metrics that its script reports. Pure.

However long a job is, a curve has few points. They lie in spans of equally many samples, and of
each span the least and the greatest are kept: a spike of the loss is seen after a week, too. Where
workers rolled back the step goes down, as it did.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.events import types as events
from torchelastic.events.analysis.ranks import Ranks
from torchelastic.events.record import Record

#: Wall clock, step (None: nobody tells steps), value.
Point = tuple[float, int | None, float]

#: Points of a curve at most, and names of metrics.
MOST = 300
NAMES = 8


class Series:
    """One curve. Takes points in the order of time."""

    def __init__(self, most: int = MOST) -> None:
        #: Two points of each span, and the last point of all.
        self._spans: list[_Span] = []
        self._most_spans = (most - 1) // 4 * 2  # an even number: two become one
        #: Points in a full span.
        self._each = 1
        self._count = 0
        self.last: Point | None = None

    def add(self, point: Point) -> None:
        self.last = point
        sample = (self._count, point)
        self._count += 1
        if self._spans and self._spans[-1].count < self._each:
            self._spans[-1].take(sample)
            return
        if len(self._spans) == self._most_spans:
            self._halve()
        self._spans.append(_Span(sample))

    def _halve(self) -> None:
        """Make one span of every two."""
        pairs = zip(self._spans[::2], self._spans[1::2], strict=True)
        self._spans = [first.join(second) for first, second in pairs]
        self._each *= 2

    def points(self) -> tuple[Point, ...]:
        kept = {sample for span in self._spans for sample in (span.low, span.high)}
        if self.last is not None:
            kept.add((self._count - 1, self.last))
        return tuple(point for _, point in sorted(kept, key=lambda sample: sample[0]))


_Sample = tuple[int, Point]


class _Span:
    """Samples that follow each other: the least and the greatest of them."""

    def __init__(self, first: _Sample) -> None:
        self.count = 1
        self.low = self.high = first

    def take(self, sample: _Sample) -> None:
        self.count += 1
        value = sample[1][2]
        if value < self.low[1][2]:
            self.low = sample
        elif value > self.high[1][2]:
            self.high = sample

    def join(self, later: _Span) -> _Span:
        count = self.count + later.count
        self.take(later.low)
        self.take(later.high)
        self.count = count
        return self


class Curves:
    """The curves of a job.

    Of all nodes that tell of a metric, the one with the lowest ranks is believed: what rank 0 says
    where it says something. Likewise for when a rate was what it was, so that one clock tells.
    """

    def __init__(self) -> None:
        self._rates = Series()
        self._metrics: dict[str, Series] = {}
        self._generation = -1
        #: Whether the generation is over: nobody trains.
        self._over = False
        #: By what they tell, the lowest rank of the nodes that tell it in this generation.
        self._tellers: dict[str | None, int] = {}
        #: The last value of each metric; None: not a finite number.
        self.reported: dict[str, float | None] = {}
        #: Samples trained so far; None: nobody counts.
        self.samples: int | None = None

    def feed(self, record: Record, ranks: Ranks) -> None:
        """Take one more record, which `ranks` has taken already."""
        generation = record.generation if record.generation is not None else -1
        match record.event:
            case events.WorldFormed() if generation > self._generation:
                self._stop(record)
                self._generation, self._over = generation, False
                self._tellers.clear()
            case events.GenerationOver() if generation == self._generation:
                self._stop(record)
            case events.JobEnded():
                self._stop(record)
            case events.Progress() as progress if generation == self._generation:
                self._progress(record, progress, ranks)

    def _stop(self, record: Record) -> None:
        """Nobody trains from now on."""
        self._over = True
        last = self._rates.last
        if last is not None and last[2] > 0.0:
            self._rates.add((record.wall, last[1], 0.0))

    def _progress(self, record: Record, progress: events.Progress, ranks: Ranks) -> None:
        lowest = min(progress.ranks, default=-1)
        if not self._over and self._is_teller(None, lowest) and ranks.step is not None:
            self._rates.add((record.wall, ranks.step, ranks.rate or 0.0))
        if progress.samples >= 0 and self._is_teller(None, lowest):
            self.samples = progress.samples
        step = max(progress.steps, default=-1)
        for name, value in progress.metrics.items():
            if self._is_teller(name, lowest) and self._has_room(name):
                self._report(name, (record.wall, step if step >= 0 else None, value))

    def _report(self, name: str, point: tuple[float, int | None, float | None]) -> None:
        wall, step, value = point
        self.reported[name] = value
        series = self._metrics.setdefault(name, Series())
        if value is not None:
            series.add((wall, step, value))

    def _is_teller(self, what: str | None, lowest: int) -> bool:
        self._tellers[what] = min(lowest, self._tellers.get(what, lowest))
        return lowest == self._tellers[what]

    def _has_room(self, name: str) -> bool:
        return name in self._metrics or len(self._metrics) < NAMES

    # --- what is known ---------------------------------------------------------------------------

    @property
    def rates(self) -> tuple[Point, ...]:
        """Steps per second; 0 where nobody trained."""
        return self._rates.points()

    @property
    def metrics(self) -> Mapping[str, tuple[Point, ...]]:
        found = ((name, series.points()) for name, series in self._metrics.items())
        return {name: points for name, points in found if points}
