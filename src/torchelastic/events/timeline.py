"""The timeline of a job: which generation is current, when it began, and why it ended. Pure.

This is the only reader of the log that answers these questions. It takes the records one by one, so
that it follows a running job, too; goodput, recoveries, the view, ranks, curves, the trace and the
metrics are functions of its generations. Each of them is fed a record after the timeline.

    starting ──> entering ──> training ──> over ──> entering ──> …      a generation each
        └──> waiting ──┘         └───────────────────> waiting ──> forming, ended

`entering` is the time from a world to its first known step; `over` lasts from the first sign of the
end of a generation to the next world, or until too few nodes are there; `forming` is the time in
which enough nodes are there again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from torchelastic.events import types as events
from torchelastic.events.record import Record

Phase = Literal["starting", "waiting", "forming", "entering", "training", "over", "ended"]
#: The phases in which there is a world.
IN_WORLD = ("entering", "training")
#: Generations that end like this lose the step in flight, and have a first failure.
DISRUPTIONS = ("failure", "error", "node-failure")
#: Generations that end like this are not followed by another.
ENDS = ("finished", "stop")
#: Generations that are kept.
GENERATIONS_LIMIT = 200


@dataclass
class Generation:
    """One generation, as far as the log goes. Times are those of `Record.time`; None: not yet."""

    #: -1: the time before the first world.
    number: int
    #: Its nodes, ranks, spares, and why it was formed.
    world: events.WorldFormed
    formed: float
    #: Wall clock of the same moment.
    wall: float
    #: Since when there had been no world; None: there was one, as far as is known.
    without: float | None = None
    #: When the first of its workers ran, if they are new processes.
    started: float | None = None
    #: The first step was seen.
    stepped: bool = False
    #: When training continued: the last worker trains or, of a plain script, has entered a step
    #: or, without any steps, runs; and the seconds of this time that state was transferred.
    resumed: float | None = None
    transfer: float = 0.0
    #: An in-process worker trained, or a step was seen: the start of a process says less.
    _trained: bool = False

    #: The first sign of its end, such as workers that stopped.
    stopped: float | None = None
    #: What the leader said when it ended the generation.
    over: events.GenerationOver | None = None
    #: When it ended: as the leader said or, without its word, as the next world or the end of the
    #: job shows; wall clock, and the reason as told then.
    ended: float | None = None
    ended_wall: float | None = None
    ended_why: str = ""
    #: When the first agent ended with success: the job is done.
    succeeded: float | None = None
    #: Why it ended, as known by now; empty until the leader ended it or another followed. `kind` as
    #: in `restart-decided`, until then as in `generation-over`; `unknown` without events of the
    #: leader.
    kind: str = ""
    why: str = ""
    #: The first failure, as in `worker-failed`.
    cause: events.Json | None = None
    #: The leader has named kind and cause after all nodes reported.
    judged: bool = False
    #: Seconds after its end with fewer than the minimum number of nodes.
    waited: float = 0.0
    _waits: float | None = None

    #: Something failed in it.
    failed: bool = False
    #: A worker of it was killed because it hung.
    hung: bool = False
    #: The first sign of a failure before its end, and what it said. `guessed`: that came later than
    #: the failure, because a node went silent or a worker hung.
    hurt: float | None = None
    hurt_why: str = ""
    guessed: bool = False
    #: Which nodes join or leave, if that ends it.
    change: str = ""
    _failures: list[events.Json] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """The number of its nodes; `world` may not name them all."""
        return self.world.count or len(self.world.nodes)

    @property
    def disrupted(self) -> bool:
        """True if a failure ended it."""
        return self.over.kind in DISRUPTIONS if self.over is not None else self.failed

    def _hurts(self, now: float, why: str, *, guessed: bool) -> None:
        """Take a failure; the time of the first one counts."""
        if self.hurt is None:
            self.hurt, self.hurt_why, self.guessed = now, why, guessed

    def _waits_for_nodes(self, now: float, *, enough: bool) -> None:
        if not enough and self._waits is None:
            self._waits = now
        elif enough and self._waits is not None:
            self.waited, self._waits = self.waited + now - self._waits, None

    def _named(self, reason: str) -> events.Json | None:
        """Return the failure that the leader names in its reason, or else the first one."""
        for failure in self._failures:
            if reason.startswith(f"rank {failure.get('rank')} on {failure.get('node')} ("):
                return failure
        return self._failures[0] if self._failures else None

    def _ends(self, now: float, wall: float, why: str) -> None:
        if self.ended is None:
            self.ended, self.ended_wall, self.ended_why = now, wall, why

    def _followed(self, record: Record, now: float, reason: str) -> None:
        """Learn from the reason of the next world, whose leader knows better."""
        self._ends(now, record.wall, reason)
        if self.over is None:
            self.kind = "resize" if self.change and self.hurt is None else "unknown"
            self.why = self.change or self.hurt_why or reason
            self.cause = self._named(self.why)
        self._waits_for_nodes(now, enough=True)
        if self.judged:
            self.why = reason
        elif self._failures:
            self.cause, self.why = self._named(reason), reason
        self._failures.clear()  # with stacks and log lines


class Timeline:
    """The generations of a job, from its records in the order of time."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        #: The last ones; the last of them is current, even if it is over.
        self.generations: deque[Generation] = deque(maxlen=GENERATIONS_LIMIT)
        self.current = Generation(-1, events.WorldFormed([], 0, "", "", 0), 0.0, 0.0)
        self.previous = self.current
        #: The record fed last formed the current generation.
        self.began = False
        #: The time of the last record; it never goes back.
        self.now = float("-inf")
        #: Ids of agents that have events and are not known to be gone.
        self.agents: set[str] = set()
        #: Those that have written their end: what they write after it does not bring them back.
        self._ended: set[str] = set()
        #: The ids of agents by the names of their nodes.
        self._ids: dict[str, str] = {}
        #: When the first agent started.
        self._started: float | None = None

    def feed(self, record: Record) -> None:
        """Take one more record."""
        self.now, self.began = max(self.now, record.time), False
        self._agent(record)
        if self.phase == "ended" and not isinstance(record.event, events.AgentStarted):
            return
        self._take(record)
        if self.is_current(record):
            self._take_of_generation(record, self.current)

    def is_current(self, record: Record) -> bool:
        """True if a record belongs to the current generation."""
        return (-1 if record.generation is None else record.generation) == self.current.number

    # --- records ---------------------------------------------------------------------------------

    def _agent(self, record: Record) -> None:
        match record.event:
            case events.AgentStarted():
                self._ended.discard(record.node)
            case events.Joined(name=name):
                self._ids[name] = record.node
        if record.node not in self._ended:
            self.agents.add(record.node)
        match record.event:
            case events.NodeLost(name=name):
                self.agents.discard(self._ids.get(name, ""))
            case events.JobEnded():
                self.agents.discard(record.node)
                self._ended.add(record.node)

    def _take(self, record: Record) -> None:
        one = self.current
        match record.event:
            case events.AgentStarted():
                self._started = self.now if self._started is None else self._started
                self.phase = "starting" if self.phase == "ended" else self.phase
            case events.NodeLost(name=name, reason=why):
                one.failed = True
                if one.over is None:
                    one._hurts(self.now, f"{name} was lost: {why}", guessed=True)
            case events.LeaseLost():
                one.failed = True
            case events.WorkerKilled() if self.phase in IN_WORLD:
                one.hung = True
            case events.WorldFormed() as formed:
                self._formed(record, formed)
            case events.Waiting(enough=enough):
                self._waits(enough)
            case events.RestartDecided() as decided:
                self._judged(decided)
            case events.JobEnded(exitcode=exitcode, reason=why):
                if exitcode == 0 and one.succeeded is None:
                    one.succeeded = self.now
                if not self.agents:
                    self._stops()
                    self.phase = "ended"
                    one._ends(self.now, record.wall, why)

    def _take_of_generation(self, record: Record, one: Generation) -> None:
        match record.event:
            case events.WorkersStarted():
                if self.phase == "entering" and one.started is None:
                    one.started = self.now
                if not one._trained:
                    self._resumes(self.now, 0.0)
            case events.Training(fetched=fetched):
                one._trained = True
                self._resumes(self.now, fetched)
            case events.Progress() as progress if not (one.stepped and one._trained):
                self._steps(record, progress)
            case events.WorldChanging(reason=why):
                one.change = why
            case events.WorkerFailed(failure=failure):
                one.failed = True
                # Peers often report a broken connection before the worker has died.
                one._failures.append(failure)
                if one.over is None:
                    one._hurts(self.now, str(failure.get("message", "")), guessed=one.hung)
            case events.WorkersStopped():
                self._stops()
            case events.GenerationOver() as over:
                self._over(record, over)

    def _formed(self, record: Record, formed: events.WorldFormed) -> None:
        last, number = self.current, record.generation if record.generation is not None else -1
        if number == last.number and formed.replica > last.world.replica:
            last.world = replace(last.world, replica=formed.replica)
        if number <= last.number:
            return  # every agent reports it
        without = last.stopped if last.number >= 0 else self._started
        self._stops()
        last._followed(record, self.now, formed.reason)
        self.previous = last
        self.current = Generation(number, formed, self.now, record.wall, without)
        self.generations.append(self.current)
        self.phase, self.began = "entering", True

    def _steps(self, record: Record, progress: events.Progress) -> None:
        one = self.current
        steps = zip(progress.steps, progress.at, strict=False)
        entered = [at for step, at in steps if step >= 0]
        if not entered:
            return
        one.stepped = True
        if self.phase == "entering":
            self.phase = "training"
        if not one._trained:  # a script that reports its steps
            one._trained = True
            at = min(entered) + record.time - record.mono
            restored = progress.stalls.get("restore", 0.0) / max(1, len(progress.ranks))
            self._resumes(max(at, one.formed), restored)

    def _resumes(self, at: float, transfer: float) -> None:
        """Note that training continues; the last worker counts."""
        if self.current.over is None:
            self.current.resumed = at
            self.current.transfer = max(self.current.transfer, transfer)

    def _over(self, record: Record, over: events.GenerationOver) -> None:
        one = self.current
        self._stops()
        if one.over is None:
            one._ends(self.now, record.wall, over.reason)
            one.over, one.kind, one.why = over, over.kind, over.reason
            one.cause = over.cause or one._named(over.reason)

    def _judged(self, decided: events.RestartDecided) -> None:
        """Take the leader's verdict after all nodes reported: the first failure seen may be a
        consequence of a node that was lost or left."""
        kind, cause = decided.kind, decided.cause
        if cause is None and (not kind or kind in DISRUPTIONS):
            return
        one = self.current if self.current.over is not None else self.previous
        if one.ended is None or (cause is None and one is not self.current):
            return
        if cause is None or cause.get("generation") == one.number:
            one.kind, one.cause, one.judged = kind or one.kind, cause, True

    def _waits(self, enough: bool) -> None:
        """Wait for nodes or, with enough of them, until they are ready."""
        self._stops()
        if self.current.over is not None:
            self.current._waits_for_nodes(self.now, enough=enough)
        if not enough:
            self.phase = "waiting"
        elif self.phase == "waiting":  # else the job is starting, or forms the next world
            self.phase = "forming" if self.generations else "starting"

    def _stops(self) -> None:
        """End the time of a world. Its last records may still arrive until the next one."""
        if self.phase in IN_WORLD:
            self.phase, self.current.stopped = "over", self.now


def timeline(records: Iterable[Record]) -> Timeline:
    """Return the timeline of a job from its records, in the order of time."""
    made = Timeline()
    for record in records:
        made.feed(record)
    return made
