"""How far each worker of the world is, and how fast. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from torchelastic.events import types as events
from torchelastic.events.record import Record

#: A rate is that of the last seconds: no less than these, no more than twice as many.
WINDOW = 5.0


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A worker of the world."""

    rank: int
    #: The name of its node.
    node: str
    #: The last step it has entered; None where that is not known.
    step: int | None = None
    #: Steps per second, lately.
    rate: float | None = None


@dataclass
class _Pace:
    """Points of one worker (step, time): the last one, and two before it to count from."""

    agent: str
    last: tuple[int, float] | None = None
    far: tuple[int, float] | None = None
    near: tuple[int, float] | None = None

    def entered(self, step: int, at: float) -> None:
        if self.last is not None and (step <= self.last[0] or at <= self.last[1]):
            return
        self.last = (step, at)
        if self.far is None or self.near is None:
            self.far = self.near = self.last
        elif at - self.near[1] >= WINDOW:
            self.far, self.near = self.near, self.last

    def rate(self) -> float | None:
        if self.last is None or self.far is None or self.last[1] <= self.far[1]:
            return None
        return (self.last[0] - self.far[0]) / (self.last[1] - self.far[1])


class Ranks:
    """The workers of the last generation that was told of."""

    def __init__(self) -> None:
        self._generation = -1
        self._paces: dict[int, _Pace] = {}
        #: Wall clock of the last step that was entered, by the clock of whoever entered it.
        self.stepped: float | None = None
        self.stragglers: dict[int, events.Straggler] = {}

    def feed(self, record: Record) -> None:
        generation = record.generation if record.generation is not None else -1
        if isinstance(record.event, events.WorldFormed) and generation > self._generation:
            self._generation = generation
            self._paces.clear()
            self.stepped = None
            self.stragglers.clear()
        if generation == self._generation:
            self._take(record)

    def _take(self, record: Record) -> None:
        match record.event:
            case events.WorkersStarted(ranks=ranks):
                for rank in ranks:
                    self._pace(rank, record)
            case events.Training(rank=rank, step=step):
                self._entered(record, rank, step, record.mono)
            case events.Progress(ranks=ranks, steps=steps, at=times):
                for rank, step, at in zip(ranks, steps, times, strict=False):
                    self._entered(record, rank, step, at)
            case events.Straggler(rank=rank) as slow:
                self.stragglers[rank] = slow

    def _entered(self, record: Record, rank: int, step: int, at: float) -> None:
        pace = self._pace(rank, record)
        if step >= 0:
            pace.entered(step, at)
            self.stepped = max(self.stepped or 0.0, record.wall - (record.mono - at))

    def _pace(self, rank: int, record: Record) -> _Pace:
        return self._paces.setdefault(rank, _Pace(record.node))

    # --- what is known ---------------------------------------------------------------------------

    def views(self, names: dict[str, str]) -> tuple[RankView, ...]:
        """By rank; `names` has the nodes' names by the ids of their agents."""
        return tuple(
            RankView(
                rank=rank,
                node=names.get(pace.agent, pace.agent),
                step=pace.last[0] if pace.last is not None else None,
                rate=pace.rate(),
            )
            for rank, pace in sorted(self._paces.items())
        )

    @property
    def step(self) -> int | None:
        """The furthest step a worker has entered."""
        return max((pace.last[0] for pace in self._paces.values() if pace.last), default=None)

    @property
    def rate(self) -> float | None:
        """Steps per second of the world: they go in step, so the median is all of theirs."""
        rates = [rate for pace in self._paces.values() if (rate := pace.rate()) is not None]
        return median(rates) if rates else None
