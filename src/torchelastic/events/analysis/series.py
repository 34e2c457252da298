"""Curves over a whole job: its step rate, and the metrics that its script reports. Pure.

A curve has a bounded number of points, however long the job is. Samples are grouped in spans of
equal count, and each span keeps its minimum and maximum, so a spike of the loss stays visible after
a week. Where workers rolled back, the step goes down.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.events import types as events
from torchelastic.events.analysis.ranks import Ranks
from torchelastic.events.record import Record
from torchelastic.events.timeline import Timeline

#: Wall clock, step (None: not reported), value.
Point = tuple[float, int | None, float]

#: Points of a curve at most, and names of metrics.
POINTS_LIMIT = 300
METRICS_LIMIT = 8


class Series:
    """One curve. Takes points in the order of time."""

    def __init__(self, most: int = POINTS_LIMIT) -> None:
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
    """The minimum and maximum of consecutive samples."""

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

    A metric is taken from the reporting node with the lowest rank, which is rank 0 if it reports
    it. So is the time of a rate, so that all times are on one clock.
    """

    def __init__(self, timeline: Timeline, ranks: Ranks) -> None:
        self._timeline, self._ranks = timeline, ranks
        self._rates = Series()
        self._metrics: dict[str, Series] = {}
        #: The generation has ended: no worker trains.
        self._over = False
        #: The lowest rank that reported each metric in this generation; None: the rate.
        self._reporters: dict[str | None, int] = {}
        #: The last value of each metric; None: not a finite number.
        self.reported: dict[str, float | None] = {}
        #: Samples trained so far; None: not counted.
        self.samples: int | None = None

    def feed(self, record: Record) -> None:
        """Take one more record, after the timeline and `ranks`."""
        if self._timeline.began:
            self._stop(record)
            self._over = False
            self._reporters.clear()
        is_current = self._timeline.is_current(record)
        match record.event:
            case events.GenerationOver() if is_current:
                self._stop(record)
            case events.JobEnded():
                self._stop(record)
            case events.Progress() as progress if is_current:
                self._progress(record, progress)

    def _stop(self, record: Record) -> None:
        """Note that training has stopped."""
        self._over = True
        last = self._rates.last
        if last is not None and last[2] > 0.0:
            self._rates.add((record.wall, last[1], 0.0))

    def _progress(self, record: Record, progress: events.Progress) -> None:
        ranks, lowest = self._ranks, min(progress.ranks, default=-1)
        if not self._over and self._is_reporter(None, lowest) and ranks.step is not None:
            self._rates.add((record.wall, ranks.step, ranks.rate() or 0.0))
        if progress.samples >= 0 and self._is_reporter(None, lowest):
            self.samples = progress.samples
        step = max(progress.steps, default=-1)
        for name, value in progress.metrics.items():
            if self._is_reporter(name, lowest) and self._has_room(name):
                self._report(name, (record.wall, step if step >= 0 else None, value))

    def _report(self, name: str, point: tuple[float, int | None, float | None]) -> None:
        wall, step, value = point
        self.reported[name] = value
        series = self._metrics.setdefault(name, Series())
        if value is not None:
            series.add((wall, step, value))

    def _is_reporter(self, what: str | None, lowest: int) -> bool:
        self._reporters[what] = min(lowest, self._reporters.get(what, lowest))
        return lowest == self._reporters[what]

    def _has_room(self, name: str) -> bool:
        return name in self._metrics or len(self._metrics) < METRICS_LIMIT

    # --- results ---------------------------------------------------------------------------------

    @property
    def rates(self) -> tuple[Point, ...]:
        """Steps per second; 0 while no worker trained."""
        return self._rates.points()

    @property
    def metrics(self) -> Mapping[str, tuple[Point, ...]]:
        found = ((name, series.points()) for name, series in self._metrics.items())
        return {name: points for name, points in found if points}
