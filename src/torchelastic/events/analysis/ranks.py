"""The step and rate of each worker of the world, and its node and local rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from torchelastic.events import types as events
from torchelastic.events.analysis.goodput import is_overdue
from torchelastic.events.record import Record
from torchelastic.events.timeline import Timeline

#: A rate covers the last seconds: at least this many, at most twice as many.
WINDOW = 5.0


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A worker of the world."""

    rank: int
    #: The name of its node.
    node: str
    #: The last step it entered; None: unknown.
    step: int | None = None
    #: Steps per second, lately; 0 if the step in flight is overdue.
    rate: float | None = None
    #: Recent seconds per step without waiting for others.
    own: float | None = None
    #: Micro-batches that it ran of its last step, with a fixed batch.
    share: int | None = None


#: A step that a worker entered, when, and its seconds without waiting until then, if known.
_Point = tuple[int, float, float | None]


@dataclass
class _Pace:
    """Points of one worker: the last one, and two before it to count from."""

    agent: str
    #: From the worker's clock to that of the job's records.
    shift: float = 0.0
    #: Seconds from the point before the last one to it.
    gap: float = 0.0
    last: _Point | None = None
    far: _Point | None = None
    near: _Point | None = None
    share: int | None = None

    def entered(self, step: int, at: float, own: float | None) -> None:
        if self.last is not None and (step <= self.last[0] or at <= self.last[1]):
            return
        self.gap = at - self.last[1] if self.last is not None else 0.0
        self.last = (step, at, own)
        if self.far is None or self.near is None:
            self.far = self.near = self.last
        elif at - self.near[1] >= WINDOW:
            self.far, self.near = self.near, self.last

    def rate(self, now: float | None) -> float | None:
        if self.last is None or self.far is None or self.last[1] <= self.far[1]:
            return None
        usual = (self.last[1] - self.far[1]) / (self.last[0] - self.far[0])
        waited = now - self.shift - self.last[1] if now is not None else 0.0
        return 0.0 if is_overdue(waited, usual=usual, gap=self.gap) else 1 / usual

    def own(self) -> float | None:
        if self.last is None or self.far is None or self.last[0] <= self.far[0]:
            return None
        (last, _, late), (first, _, early) = self.last, self.far
        return None if late is None or early is None else max(0.0, late - early) / (last - first)


class Ranks:
    """The workers of the last generation."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._paces: dict[int, _Pace] = {}
        #: Wall clock of the last step entered, on the clock of the worker's machine.
        self.stepped: float | None = None
        self.stragglers: dict[int, events.Straggler] = {}
        #: Seconds lost to stragglers: in this generation; in the one before, whose last report may
        #: come late; and in those before that.
        self._lost = self._lost_lately = self._lost_before = 0.0

    @property
    def lost(self) -> float:
        return self._lost_before + self._lost_lately + self._lost

    def feed(self, record: Record) -> None:
        """Take one more record, after the timeline."""
        if self._timeline.began:
            self._begin()
        if self._timeline.is_current(record):
            self._take(record)
        elif (
            isinstance(record.event, events.Straggler)
            and record.generation == self._timeline.previous.number
        ):
            self._lost_lately = max(self._lost_lately, record.event.lost)

    def _begin(self) -> None:
        self._paces.clear()
        self.stepped = None
        self.stragglers.clear()
        self._lost_before += self._lost_lately
        self._lost_lately, self._lost = self._lost, 0.0

    def _take(self, record: Record) -> None:
        match record.event:
            case events.WorkersStarted(ranks=ranks):
                for rank in ranks:
                    self._pace(rank, record)
            case events.Training(rank=rank, step=step):
                self._entered(record, rank, step, record.mono, 0.0)
            case events.Progress(ranks=ranks, steps=steps, at=times, own=own, shares=shares):
                for rank, share in zip(ranks, shares, strict=False):
                    self._pace(rank, record).share = share
                points = zip_longest(zip(ranks, steps, times, strict=False), own[: len(ranks)])
                for (rank, step, at), spent in points:
                    self._entered(record, rank, step, at, spent)
            case events.Straggler() as slow:
                self._is_slow(slow)

    def _is_slow(self, slow: events.Straggler) -> None:
        """Update the stragglers; the cost of one that keeps up again still counts."""
        self._lost = max(self._lost, slow.lost)
        if slow.over:
            self.stragglers.pop(slow.rank, None)
        else:
            self.stragglers[slow.rank] = slow

    def _entered(
        self, record: Record, rank: int, step: int, at: float, own: float | None = None
    ) -> None:
        pace = self._pace(rank, record)
        if step >= 0:
            pace.shift = record.time - record.mono
            pace.entered(step, at, own)
            self.stepped = max(self.stepped or 0.0, record.wall - (record.mono - at))

    def _pace(self, rank: int, record: Record) -> _Pace:
        return self._paces.setdefault(rank, _Pace(record.node))

    # --- results ---------------------------------------------------------------------------------

    def views(self, names: dict[str, str], now: float | None) -> tuple[RankView, ...]:
        """Return the views by rank; `names` maps agent ids to node names. `now`: see `rate`."""
        return tuple(
            RankView(
                rank=rank,
                node=names.get(pace.agent, pace.agent),
                step=pace.last[0] if pace.last is not None else None,
                rate=pace.rate(now),
                own=pace.own(),
                share=pace.share,
            )
            for rank, pace in sorted(self._paces.items())
        )

    @property
    def step(self) -> int | None:
        """The furthest step that a worker entered."""
        return max((pace.last[0] for pace in self._paces.values() if pace.last), default=None)

    def rate(self, now: float | None = None) -> float | None:
        """Steps per second of the world: the median, since ranks go in step.

        With `now`, on the clock of the job's records, 0 if the step in flight is overdue.
        """
        rates = [rate for pace in self._paces.values() if (rate := pace.rate(now)) is not None]
        return median(rates) if rates else None


# --- where each worker runs ----------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class RankLocation:
    """The agent and local rank of a worker in a generation."""

    rank: int
    #: The id of its agent.
    agent: str
    local_rank: int


@dataclass
class RankLocations:
    """The places of one generation: the wanted one, or the last."""

    wanted: int | None = None
    generation: int = -1
    _workers: dict[str, int] = field(default_factory=dict)
    _ranks: dict[str, set[int]] = field(default_factory=dict)

    def feed(self, record: Record) -> None:
        if isinstance(record.event, events.AgentStarted):
            self._workers[record.node] = record.event.nproc
        generation = record.generation if record.generation is not None else -1
        if self.wanted is not None and generation != self.wanted:
            return
        ranks = _ranks_in(record.event)
        if ranks and generation >= self.generation:
            if generation > self.generation:
                self.generation = generation
                self._ranks.clear()
            self._ranks.setdefault(record.node, set()).update(ranks)

    def known(self) -> list[RankLocation]:
        """Return places by rank, of nodes whose ranks are all known: local ranks follow ranks."""
        return sorted(
            RankLocation(rank, agent, local_rank)
            for agent, ranks in self._ranks.items()
            if len(ranks) == self._workers.get(agent, len(ranks))
            for local_rank, rank in enumerate(sorted(ranks))
        )


def _ranks_in(event: events.Event | None) -> list[int]:
    match event:
        case events.WorkersStarted(ranks=ranks) | events.Progress(ranks=ranks):
            return list(ranks)
        case events.Training(rank=rank):
            return [rank]
    return []
