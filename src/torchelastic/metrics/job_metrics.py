"""The metrics of a job that an agent serves at `/metrics`. Pure: records in, values out.

The values come from `events.analysis.view`, like everywhere else; only counters and histograms are
kept here. An agent reports its own node, and the job from its own point of view: only the leader
knows why generations end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Literal, get_args

from torchelastic.events import types as events
from torchelastic.events.analysis.view import JobFold, JobPhase, JobView
from torchelastic.events.record import Record
from torchelastic.events.timeline import DISRUPTIONS

#: Upper bounds in seconds, for the time that a rendezvous or a recovery takes.
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """A histogram of durations."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of durations up to it), ending with `+Inf`."""
        total, found = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(frozen=True)
class Family:
    """One metric: its name without our prefix, and its values by labels."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    values: Mapping[Labels, float] = field(default_factory=dict)
    #: Only for a histogram, instead of values.
    buckets: tuple[tuple[str, float], ...] = ()
    sum: float = 0.0


class JobMetrics:
    """Takes the records of an agent one by one."""

    def __init__(self) -> None:
        self._fold = JobFold()
        self._over: Counter[str] = Counter()
        self._failures = 0
        self._killed = 0
        self._rendezvous = Histogram()
        self._recovery = Histogram()
        #: Generation and time of the first failure that training has not recovered from.
        self._hurt: tuple[int, float] | None = None

    def feed(self, record: Record) -> None:
        """Add a record."""
        self._fold.feed(record)
        current = self._fold.timeline.current
        if self._fold.timeline.began and current.without is not None:
            self._rendezvous.observe(max(0.0, current.formed - current.without))
        match record.event:
            case events.GenerationOver(kind=kind):
                self._over[kind] += 1
                if kind in DISRUPTIONS:
                    self._hurts(record)
            case events.NodeLost():
                self._hurts(record)
            case events.WorkerFailed(failure=failure):
                # A survivor of `train` that reports a lost peer is still alive.
                self._failures += not failure.get("alive", False)
                self._hurts(record)
            case events.WorkerKilled():
                self._killed += 1
            case events.Training() | events.WorkersStarted():
                self._runs(record)

    def _hurts(self, record: Record) -> None:
        generation = self._fold.timeline.current.number
        if self._hurt is None and generation >= 0:
            self._hurt = (generation, record.time)

    def _runs(self, record: Record) -> None:
        generation = -1 if record.generation is None else record.generation
        if self._hurt is not None and generation > self._hurt[0]:
            self._recovery.observe(max(0.0, record.time - self._hurt[1]))
            self._hurt = None

    # --- values ----------------------------------------------------------------------------------

    def families(self, now: float | None = None) -> list[Family]:
        """Return all metrics at `now`, a wall clock time."""
        view = self._fold.view(now)
        return [
            *_of_world(view),
            *self._counted(),
            *_of_training(view),
            *_of_storage(view, now),
            *_of_time(view),
        ]

    def _counted(self) -> Iterator[Family]:
        yield Family(
            "generations_over",
            "counter",
            "Generations that have ended, by cause. Counted by the leader.",
            {(("cause", kind),): float(count) for kind, count in sorted(self._over.items())},
        )
        yield _one(
            "worker_failures",
            "counter",
            "Workers of this node that failed.",
            self._failures,
        )
        yield _one(
            "workers_killed",
            "counter",
            "Workers of this node killed because they were hung.",
            self._killed,
        )
        yield _times(
            "rendezvous_seconds",
            "Time from the end of a world to the next world.",
            self._rendezvous,
        )
        yield _times(
            "recovery_seconds",
            "Time from a detected failure until workers run again.",
            self._recovery,
        )


def _of_world(view: JobView) -> Iterator[Family]:
    yield Family("job", "info", "The job that this agent runs.", {(("run_id", view.job),): 1.0})
    phases = {phase: float(view.phase == phase) for phase in get_args(JobPhase)}
    yield _by(
        "phase", "phase", "Phase of the job: 1 for the current phase, 0 for the others.", phases
    )
    world = view.worlds[-1] if view.worlds else None
    gauges: dict[str, tuple[str, float | None]] = {
        "generation": ("Generation: the number of the world.", view.generation),
        "world_size": ("Workers in the world.", view.size),
        "world_nodes": ("Nodes in the world.", world.count if world is not None else 0),
        "min_nodes": ("Fewest nodes the job runs with.", view.min_nodes),
        "max_nodes": ("Most nodes the job runs with.", view.max_nodes),
        "restarts_used": ("Restarts used from the restart budget.", view.restarts_used),
    }
    for name, (words, value) in gauges.items():
        if value is not None:
            yield _one(name, "gauge", words, value)


def _of_training(view: JobView) -> Iterator[Family]:
    steps = ((rank.rank, rank.step) for rank in view.ranks)
    yield _by_rank("step", "Last step that a worker of this node has started.", steps)
    rates = ((rank.rank, rank.rate) for rank in view.ranks)
    yield _by_rank("steps_per_second", "Recent step rate of a worker of this node.", rates)
    own = ((rank.rank, rank.own) for rank in view.ranks)
    help = "Recent time per step of a worker of this node, without waiting for other workers."
    yield _by_rank("own_seconds_per_step", help, own)
    # NaN where a value is not a number.
    values = {name: nan if value is None else value for name, value in view.reported.items()}
    yield _by("name", "metric", "Last value that the script reported, by name.", values)
    if view.samples is not None:
        help = "Samples that all workers of the job have trained on."
        yield _one("samples", "gauge", help, view.samples)
    costs = ((slow.rank, slow.cost) for slow in view.stragglers)
    yield _by_rank(
        "straggler_cost_seconds", "Time the job lost by waiting for this slow worker.", costs
    )
    help = "Time the job lost by waiting for slow workers. Counted by the leader."
    yield _one("straggler_lost_seconds", "counter", help, view.straggler_seconds)


def _of_storage(view: JobView, now: float | None) -> Iterator[Family]:
    """The last checkpoint: only the agent whose worker wrote it reports it."""
    stored = view.checkpoint
    if stored is None:
        return
    yield _one("checkpoint_step", "gauge", "Step of the last checkpoint.", stored.step)
    yield _one("checkpoint_bytes", "gauge", "Size of the last checkpoint.", stored.size)
    help = "Time it took to write the last checkpoint, in the background."
    yield _one("checkpoint_write_seconds", "gauge", help, stored.seconds)
    if now is not None:
        age = max(0.0, now - stored.wall)
        yield _one(
            "checkpoint_age_seconds", "gauge", "Time since the last checkpoint was stored.", age
        )
    if view.step is not None:
        behind = max(0, view.step - stored.step)
        yield _one("checkpoint_age_steps", "gauge", "Steps since the last checkpoint.", behind)


def _of_time(view: JobView) -> Iterator[Family]:
    recovery = view.last_recovery
    if recovery is not None:
        names = ("detect", "wait", "agree", "rebuild", "transfer", "redo")
        parts = {name: getattr(recovery, name) for name in names}
        yield _by("part", "last_recovery_seconds", "Cost of the last failure, by part.", parts)
    if view.goodput is not None:
        if view.goodput.ratio is not None:
            words = "Productive time divided by total time, as seen by this agent."
            yield _one("goodput_ratio", "gauge", words, view.goodput.ratio)
        spent = {str(part): micros / 1e6 for part, micros in view.goodput.micros.items()}
        yield _by(
            "part", "time_seconds", "How the job spent its time, as seen by this agent.", spent
        )


def _one(name: str, kind: Literal["gauge", "counter"], help: str, value: float) -> Family:
    return Family(name, kind, help, {(): float(value)})


def _by_rank(name: str, help: str, values: Iterable[tuple[int, float | None]]) -> Family:
    return _by("rank", name, help, {str(rank): value for rank, value in values})


def _by(label: str, name: str, help: str, values: Mapping[str, float | None]) -> Family:
    """Return a gauge for each label that has a value."""
    known: dict[Labels, float] = {
        ((label, key),): float(value) for key, value in values.items() if value is not None
    }
    return Family(name, "gauge", help, known)


def _times(name: str, help: str, times: Histogram) -> Family:
    return Family(name, "histogram", help, buckets=tuple(times.buckets()), sum=times.sum)
