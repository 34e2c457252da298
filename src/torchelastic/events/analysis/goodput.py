"""Goodput: how much of a job's time went into training, and where the rest went. Pure.

The definitions follow ml-goodput-measurement; docs/guides/goodput.md lists the differences. Time is
counted in whole microseconds, so that the parts add up to the total exactly: a cursor moves along
the job's time, and everything it passes goes to one of the parts.

The phases are those of the timeline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchelastic.events import types as events
from torchelastic.events.record import Record
from torchelastic.events.timeline import ENDS, IN_WORLD, Generation, Phase, Timeline

Part = Literal[
    "productive",
    "startup",
    "rendezvous",
    "restore",
    "redone",
    "skipped",
    "checkpoint",
    "data",
    "waiting",
    "other",
    "unknown",
]
_Pieces = Iterator[tuple[Part, int]]

#: Labels of the parts.
PARTS: dict[Part, str] = {
    "productive": "training",
    "startup": "start-up",
    "rendezvous": "rendezvous",
    "restore": "restoring state",
    "redone": "redone steps",
    "skipped": "bad steps",
    "checkpoint": "saving state",
    "data": "data stalls",
    "waiting": "waiting for nodes",
    "other": "other",
    "unknown": "running (steps not reported)",
}
#: The part that time without a world belongs to, by phase.
_WITHOUT: dict[Phase, Part] = {
    "starting": "startup",
    "waiting": "waiting",
    "forming": "rendezvous",
}
#: The part that a stall belongs to, by the kind that workers report.
_STALLS: dict[str, Part] = {
    "data": "data",
    "checkpoint": "checkpoint",
    "snapshot": "checkpoint",
    "restore": "restore",
}


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The goodput of a job, by parts."""

    #: Whole microseconds of every part: their sum is the total.
    micros: Mapping[Part, int]
    #: Generations that a failure ended.
    disruptions: int = 0
    #: Known steps that were finished and had to be run again.
    redone_steps: int = 0
    #: False if a script was restarted at an unknown step.
    redone_known: bool = True
    #: False if no step was seen: whether the workers trained is unknown.
    steps_known: bool = True
    #: Mean share of the maximum number of nodes that were in a world, and that were available.
    active_nodes: float | None = None
    available_nodes: float | None = None

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.micros.values()) / 1e6

    @property
    def productive(self) -> float:
        """Seconds of training that was kept."""
        return self.micros["productive"] / 1e6

    @property
    def ratio(self) -> float | None:
        """Productive time by total time; None if no step is known or no time has passed."""
        return self.productive / self.total if self.total and self.steps_known else None

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of everything that is not productive."""
        return {part: us / 1e6 for part, us in self.micros.items() if part != "productive"}

    def to_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "productive": self.productive,
            "ratio": self.ratio,
            "parts": self.parts,
            "disruptions": self.disruptions,
            "redone_steps": self.redone_steps,
            "redone_known": self.redone_known,
            "steps_known": self.steps_known,
            "active_nodes": self.active_nodes,
            "available_nodes": self.available_nodes,
        }


def goodput(records: Iterable[Record]) -> Goodput:
    """Return the goodput of a job from its records, in the order of time, up to the last one."""
    fold = GoodputFold()
    for record in records:
        fold.feed(record)
    return fold.at()


@dataclass
class _World:
    """The steps of a generation."""

    of: Generation
    #: No generation was before it.
    first_of_all: bool = True
    trained_at: int | None = None
    #: Steps that were committed when it started.
    base: int | None = None
    built: int = 0
    fetched: int = 0
    #: Its steps are optimizer steps (`Progress.before`); `shift` is added to them, so that they
    #: continue where those of the generation before ended.
    from_outside: bool = False
    shift: int = 0
    base_known: bool = True
    #: When its first step was entered; None: not yet.
    begun: int | None = None
    #: How much of the time before was start-up.
    startup: int = 0
    #: The first point with a step of it done, and the last one: step, time.
    first: tuple[int, int] | None = None
    last: tuple[int, int] = (-1, 0)
    #: Microseconds from the point before the last one to it.
    gap: int = 0
    #: Microseconds that a step takes.
    usual: float | None = None
    warmed_up: bool = False
    #: When the last program that has returned did so; its process took longer to end.
    returned_at: int | None = None
    #: Bad steps whose time is not assigned yet, each with what was done about it.
    bad: set[tuple[int, str]] = field(default_factory=set)
    #: By node: microseconds of stalls per worker so far, by part.
    stalls: dict[str, dict[Part, int]] = field(default_factory=dict)
    #: The part of them that the cursor has passed.
    counted: dict[Part, int] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """True if its workers are new processes that have to load their script."""
        return self.first_of_all or self.of.started is not None

    @property
    def running_since(self) -> int | None:
        return None if self.of.started is None else _micros(self.of.started)

    @property
    def over_at(self) -> int | None:
        return None if self.of.stopped is None else _micros(self.of.stopped)

    def hangs(self, until: int) -> bool:
        """Whether the step in flight takes so long that the workers seem to be hung."""
        if self.usual is None:
            return False
        waited, usual, gap = (until - self.last[1]) / 1e6, self.usual / 1e6, self.gap / 1e6
        return is_overdue(waited, usual=usual, gap=gap)

    def stalled(self) -> dict[Part, int]:
        """Return the stalls so far: those of the node with the most, since the others wait."""
        most: dict[Part, int] = {}
        for parts in self.stalls.values():
            for part, micros in parts.items():
                most[part] = max(most.get(part, 0), micros)
        return most


class GoodputFold:
    """Computes goodput from a job's records, one by one in the order of time.

    With a `timeline` that others read, too: feed it each record after that.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline if timeline is not None else Timeline()
        self._feeds_timeline = timeline is None
        self._micros: dict[Part, int] = dict.fromkeys(PARTS, 0)
        #: The phase that the cursor is in.
        self._phase: Phase = "starting"
        self._begun = False
        #: Up to where time is assigned to a part, and the time of the last record.
        self._cursor = 0
        self._now = 0
        self._world = _World(self._timeline.current)
        self._steps = StepTime()
        self._nodes = NodeTime(self._timeline)
        #: Generations before the current one that a failure ended.
        self._disruptions = 0
        self._redone_steps = 0
        self._steps_known = False
        self._redone_known = True
        #: The optimizer's step number means the same in all generations.
        self._same_numbers = True
        #: Steps are optimizer steps.
        self._counts = False

    def feed(self, record: Record) -> None:
        """Take one more record."""
        if self._feeds_timeline:
            self._timeline.feed(record)
        time = _micros(record.time)
        if not self._begun:
            self._begun, self._cursor, self._now = True, time, time
        if self._phase == self._timeline.phase == "ended":
            return
        self._now = max(self._now, time)
        self._nodes.feed(record, self._now)
        self._turn_to(self._timeline.phase)
        if self._timeline.is_current(record):
            self._take(record)

    def at(self, now: float | None = None) -> Goodput:
        """Return the goodput up to the last record or, for a running job, up to `now`."""
        until = self._now
        if now is not None and self._phase != "ended" and self._begun:
            until = max(until, _micros(now))
        micros = dict(self._micros)
        for part, span in self._open(until):
            micros[part] += span
        return Goodput(
            micros=micros,
            disruptions=self._disruptions + self._is_disrupted,
            redone_steps=self._redone_steps,
            redone_known=self._redone_known,
            steps_known=self._steps_known,
            active_nodes=self._nodes.active(until),
            available_nodes=self._nodes.available(until),
        )

    @property
    def steps_known(self) -> bool:
        """True if some worker reported its steps."""
        return self._steps_known

    @property
    def redone_known(self) -> bool:
        """True if the step at which the current generation continued is known."""
        world = self._world
        return world.base_known and (world.begun is not None or not self._counts)

    @property
    def redone(self) -> float:
        """Known seconds of steps that had to be run again."""
        return self._micros["redone"] / 1e6

    @property
    def due(self) -> float | None:
        """When the step in flight should be done, judging by earlier steps; None: unknown.

        Without earlier steps, all the time of a hung step counts as hanging.
        """
        world = self._world
        if world.usual is not None:
            return (world.last[1] + world.usual) / 1e6
        since = world.last[1] if world.begun is not None else world.trained_at
        return since / 1e6 if world.of.hung and since is not None else None

    # --- records ---------------------------------------------------------------------------------

    @property
    def _is_disrupted(self) -> bool:
        """True if a failure has ended the current generation."""
        return self._world.of.stopped is not None and self._world.of.disrupted

    def _turn_to(self, phase: Phase) -> None:
        """Turn to the phase of the timeline, and to its generation."""
        if self._phase == "ended" != phase:
            # No agent was running meanwhile.
            self._spend([("waiting", self._now - self._cursor)])
        elif self._phase in IN_WORLD and (self._timeline.began or phase not in IN_WORLD):
            self._phase = "over"  # its last records may still come
        if self._timeline.began:
            self._assign_time()
            self._disruptions += self._is_disrupted
            self._world = _World(self._timeline.current, first_of_all=self._world.of.number < 0)
        elif phase not in (*IN_WORLD, self._phase):
            self._assign_time(last=phase == "ended")
        self._phase = phase

    def _take(self, record: Record) -> None:
        world = self._world
        match record.event:
            case events.Training() as up if self._phase == "entering":
                self._know_steps()
                world.trained_at, world.base = self._now, up.step
                world.built = max(world.built, _micros(up.built))
                world.fetched = max(world.fetched, _micros(up.fetched))
                self._roll_back(up.step)
            case events.Progress() as progress:
                self._progress(record, progress)
            case events.StepSkipped(step=step, action=action):
                world.bad.add((step, action))
            case events.WorkerExited(exitcode=0) as exited:
                returned = self._now - max(0, _micros(exited.exiting))
                world.returned_at = max(world.returned_at or 0, returned)

    # --- steps -----------------------------------------------------------------------------------

    def _progress(self, record: Record, progress: events.Progress) -> None:
        if self._phase not in (*IN_WORLD, "over"):
            return
        world = self._world
        world.stalls[record.node] = _per_worker(progress)
        entered = [pair for pair in zip(progress.steps, progress.at, strict=False) if pair[0] >= 0]
        if not entered:
            return
        self._know_steps()
        step, at = max(entered, key=lambda pair: (pair[0], -pair[1]))
        if progress.before is not None:
            self._count(progress.before, step)
        step += world.shift
        latest = self._now if world.over_at is None else world.over_at
        # On the clock of `record.time`, which may not be that of its machine.
        time = min(max(_micros(at + record.time - record.mono), self._cursor), latest)
        if world.begun is None:
            self._begin(step, time)
        if step > world.last[0]:
            self._stepped(step, time)

    def _know_steps(self) -> None:
        """Note that steps are reported: workers that ran before without any did not train."""
        if not self._steps_known:
            self._steps_known = True
            self._micros["startup"] += self._micros["unknown"]
            self._micros["unknown"] = 0

    def _count(self, before: int, step: int) -> None:
        """Take an optimizer step. If the optimizer does not know how many came before, steps are
        assumed to continue those of the generation before; redone steps are then unknown."""
        world = self._world
        if before < 0:
            self._same_numbers = False
        if world.begun is not None:
            return
        self._counts = world.from_outside = True
        last, world.base = self._steps.last, before if before >= 0 else step
        if last >= 0 and not (before > 0 and self._same_numbers):
            world.shift, world.base = last - world.base, last
            world.base_known = self._same_numbers = self._redone_known = False

    def _begin(self, step: int, time: int) -> None:
        """Take the first step of a generation: later steps of older ones are redone."""
        world = self._world
        world.begun = time if world.trained_at is None else min(world.trained_at, time)
        world.base = base = step if world.base is None else world.base
        startup = self._micros["startup"]
        self._spend(self._arriving(world.begun))
        world.startup = self._micros["startup"] - startup
        world.counted["restore"] = world.stalled().get("restore", 0)
        self._roll_back(base)
        self._steps.add(base, self._micros["productive"])
        world.last = (base, world.begun)

    def _roll_back(self, base: int) -> None:
        kept = self._steps.at(base)
        if kept is None:
            return
        lost = self._micros["productive"] - kept
        self._micros["productive"] -= lost
        self._micros["redone"] += lost
        # The last step entered was not finished.
        self._redone_steps += self._steps.last - base
        self._steps.roll_back(base)

    def _stepped(self, step: int, time: int) -> None:
        world = self._world
        if world.first is not None:
            world.usual = (time - world.first[1]) / (step - world.first[0])
            self._warm_up(world.usual)
        before = self._micros["productive"]
        self._spend(self._trained(time))
        world.counted = world.stalled()
        self._skip(step, self._micros["productive"] - before)
        self._steps.add(step, self._micros["productive"])
        if world.first is None:
            world.first = (step, time)
        world.last, world.gap = (step, time), time - world.last[1]

    def _skip(self, step: int, trained: int) -> None:
        """Take the time of bad steps out of that of all steps since the last point."""
        world = self._world
        done = {bad for bad in world.bad if bad[0] <= step}
        world.bad -= done
        times = step - world.last[0] + sum(action == "retry" for _, action in done)
        lost = trained * min(len(done), times) // times
        self._micros["productive"] -= lost
        self._micros["skipped"] += lost

    def _warm_up(self, usual: float) -> None:
        """Count the time of the first steps beyond the usual as start-up."""
        world = self._world
        if world.warmed_up or world.first is None or world.begun is None or world.base is None:
            return
        world.warmed_up = True
        step, time = world.first
        excess = round(time - world.begun - (step - world.base) * usual)
        # Optimizer steps are done when they are seen.
        least = -world.startup if world.from_outside else 0
        most = self._micros["productive"] - (self._steps.at(world.base) or 0)
        excess = max(least, min(excess, most))
        self._micros["productive"] -= excess
        self._micros["startup"] += excess
        self._steps.less(excess)

    # --- assigning time to parts -----------------------------------------------------------------

    def _spend(self, pieces: Iterable[tuple[Part, int]]) -> None:
        """Move the cursor over pieces of time, each assigned to its part."""
        for part, span in list(pieces):  # a list first: the pieces depend on the cursor
            self._micros[part] += span
            self._cursor += span

    def _assign_time(self, *, last: bool = False) -> None:
        """Assign all time up to now: the current phase has ended."""
        world = self._world
        if self._phase == "over" and world.begun is None and world.base is not None:
            # Unreported steps: all of them are lost if the next world has the same base.
            self._steps.add(world.base, self._micros["productive"])
        self._spend(self._open(self._now, last=last))
        if self._phase == "over" and world.begun is not None and not world.of.disrupted:
            self._steps.add(world.last[0] + 1, self._micros["productive"])

    def _open(self, until: int, *, last: bool = False) -> _Pieces:
        """Yield the parts of the time from the cursor on, as known now."""
        world = self._world
        if self._phase == "entering":
            yield from self._entering(until)
        elif self._phase == "training":
            yield from self._last_step(until)
        elif self._phase == "over" and world.over_at is not None:
            over, end = world.over_at, self._end_of_training(world.over_at)
            yield from self._entering(end) if world.begun is None else self._last_step(end)
            yield "other", over - end
            done = last or (world.of.over is not None and world.of.over.kind in ENDS)
            yield "other" if done else "rendezvous", until - over
        elif self._phase in _WITHOUT:
            yield _WITHOUT[self._phase], until - self._cursor

    def _end_of_training(self, over: int) -> int:
        """When the programs had returned: to end a process takes time, too."""
        world = self._world
        if world.returned_at is None or world.of.disrupted:
            return over
        earliest = max(self._cursor, world.running_since or 0, world.trained_at or 0)
        return min(over, max(earliest, world.returned_at))

    def _entering(self, until: int) -> _Pieces:
        """Yield the time of a world without a known step."""
        world = self._world
        if world.trained_at is not None:
            yield from self._arriving(world.trained_at)
            yield "other" if world.of.hung else "productive", until - world.trained_at
        elif world.running_since is not None and not self._steps_known:
            yield "startup", world.running_since - self._cursor
            yield "unknown", until - world.running_since
        else:
            yield from self._arriving(until)

    def _arriving(self, until: int) -> _Pieces:
        """Yield the time from the world to its first step."""
        world, share = self._world, _Share(until - self._cursor)
        yield share.give("restore", max(world.fetched, world.stalled().get("restore", 0)))
        yield share.give("rendezvous", world.built)
        yield share.give("startup" if world.fresh else "rendezvous", share.left)

    def _trained(self, until: int) -> _Pieces:
        share = _Share(until - self._cursor)
        yield from self._stalls(share)
        yield share.give("productive", share.left)

    def _last_step(self, until: int) -> _Pieces:
        """Yield the time of the step in flight: lost after a failure; beyond the usual, hanging.

        Once a long step is done, all of it is training (`_stepped`): it may be an evaluation.
        """
        world, share = self._world, _Share(until - self._cursor)
        yield from self._stalls(share)
        usual = share.left if world.usual is None else round(world.usual)
        if self._phase == "over" and world.of.disrupted:
            known = 0 if world.of.hung and world.usual is None else usual
            yield share.give("redone", known)
        else:
            yield share.give("productive", usual if world.hangs(until) else share.left)
        yield share.give("other", share.left)

    def _stalls(self, share: _Share) -> _Pieces:
        counted = self._world.counted
        for part, micros in self._world.stalled().items():
            yield share.give(part, micros - counted.get(part, 0))


class _Share:
    """A span of time that is assigned part by part."""

    def __init__(self, span: int) -> None:
        self.left = max(0, span)

    def give(self, part: Part, most: int) -> tuple[Part, int]:
        span = min(max(0, most), self.left)
        self.left -= span
        return part, span


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _per_worker(progress: events.Progress) -> dict[Part, int]:
    """Return stalls per worker: a node reports their sum, but they happen in parallel."""
    workers = max(1, len(progress.ranks))
    parts: dict[Part, int] = {}
    for kind, seconds in progress.stalls.items():
        if (part := _STALLS.get(kind)) is not None:
            parts[part] = parts.get(part, 0) + _micros(seconds / workers)
    return parts


# --- steps over time ------------------------------------------------------------------------------

#: Points kept. Beyond that, every other older one is dropped: the cost of a roll-back far into the
#: past is then less exact.
_POINTS_LIMIT = 4096

#: A step is overdue after this many seconds, and this many times the usual.
OVERDUE_AFTER, OVERDUE_FACTOR = 10.0, 5.0


def is_overdue(waited: float, *, usual: float, gap: float) -> bool:
    """Whether a step takes so long that the job seems to hang; all in seconds.

    `gap` is the time between the last two steps that were seen: agents look less often in large
    worlds, and the longer a generation lasts.
    """
    return waited > max(OVERDUE_AFTER, OVERDUE_FACTOR * usual, 2 * gap)


class StepTime:
    """Points of (a step, the productive microseconds when it was entered); both only grow."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._micros: list[int] = []

    @property
    def last(self) -> int:
        """The furthest step so far; -1: none."""
        return self._steps[-1] if self._steps else -1

    def add(self, step: int, micros: int) -> None:
        """Add a step that was entered; roll back first if it was entered before."""
        if self._steps and step <= self._steps[-1]:
            return
        self._steps.append(step)
        self._micros.append(micros)
        if len(self._steps) > _POINTS_LIMIT:
            del self._steps[1 : _POINTS_LIMIT // 2 : 2], self._micros[1 : _POINTS_LIMIT // 2 : 2]

    def less(self, micros: int) -> None:
        """Remove time before the last point that turned out not to be productive."""
        if self._micros:
            self._micros[-1] -= micros

    def at(self, step: int) -> int | None:
        """Return the productive microseconds when a step was entered; None: it never was."""
        place = bisect_left(self._steps, step)
        if place == len(self._steps):
            return None
        if place == 0 or self._steps[place] == step:
            return self._micros[place]
        before, after = self._steps[place - 1], self._steps[place]
        begun, span = self._micros[place - 1], self._micros[place] - self._micros[place - 1]
        return begun + span * (step - before) // (after - before)

    def roll_back(self, step: int) -> None:
        """Forget what was done from this step on."""
        place = bisect_left(self._steps, step)
        del self._steps[place:], self._micros[place:]


# --- nodes over time ------------------------------------------------------------------------------


class NodeTime:
    """Integrals over time of the nodes in a world, and of those available."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._most = 0
        self._present: set[str] = set()
        #: Nodes of the world whose names this log does not have.
        self._unnamed = 0
        self._active = 0
        self._since = 0
        self._begun: int | None = None
        self._active_micros = 0
        self._available_micros = 0

    def feed(self, record: Record, now: int) -> None:
        """`now` is the record's time in microseconds; it never goes back."""
        if self._begun is None:
            self._begun = self._since = now
        self._active_micros, self._available_micros = self._until(now)
        self._since = now
        match record.event:
            case events.AgentStarted(max_nodes=most):
                self._most = max(self._most, most)
            case events.Joined(name=name) | events.NodeJoined(name=name):
                self._present.add(name)
            case events.NodeLost(name=name) | events.NodeLeaving(name=name):
                self._present.discard(name)
            case events.GenerationOver() if self._timeline.is_current(record):
                self._active = 0
            case events.Waiting():
                self._active = 0
        if self._timeline.began:
            world = self._timeline.current.world
            self._active = self._timeline.current.nodes
            self._unnamed = self._active - len(world.nodes)
            self._present.update(world.nodes, world.spares)

    def active(self, now: int) -> float | None:
        """Return the mean share of `max` nodes that were in a world; None: unknown yet."""
        return self._share(self._until(now)[0], now)

    def available(self, now: int) -> float | None:
        """Return the mean share of `max` nodes that were available, in a world or not."""
        return self._share(self._until(now)[1], now)

    def _share(self, micros: int, now: int) -> float | None:
        span = now - self._begun if self._begun is not None else 0
        return micros / (span * self._most) if span > 0 and self._most else None

    def _until(self, now: int) -> tuple[int, int]:
        passed = max(0, now - self._since)
        present = max(len(self._present) + self._unnamed, self._active)
        return (
            self._active_micros + passed * min(self._active, self._most),
            self._available_micros + passed * min(present, self._most),
        )
