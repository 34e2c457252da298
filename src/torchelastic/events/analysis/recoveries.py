"""Recoveries: the cost of each change of the world, until training is as far as before. Pure.

cause ──detect──> generation over ──(wait)──agree──> next world ──rebuild, transfer──> training
                                                                          ──redo──> as far again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis.goodput import DISRUPTIONS, GoodputFold
from torchelastic.events.record import Record

#: Recoveries kept, the last ones; `RecoveryTotals` has all.
RECOVERIES_LIMIT = 50


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From one world to the next, in seconds; None: not there yet, or unknown."""

    #: The generation that ended.
    generation: int
    #: Wall clock of its end.
    wall: float
    #: What ended it, as in `restart-decided`, until then as in `generation-over`; `unknown` without
    #: events of the leader.
    kind: str
    why: str
    #: The first failure seen, as in `worker-failed`.
    failure: Mapping[str, Any] | None = None
    #: From the failure, if known, to the end of the generation.
    detect: float = 0.0
    #: With fewer than the minimum number of nodes.
    wait: float = 0.0
    agree: float | None = None
    #: From the next world to training, without the transfer; or to the failure that ended that
    #: world, too.
    rebuild: float | None = None
    transfer: float | None = None
    #: Time spent on lost steps, which have to be run again.
    redo: float | None = None

    @property
    def is_failure(self) -> bool:
        return self.kind in DISRUPTIONS or (self.kind == "unknown" and self.failure is not None)

    @property
    def cost(self) -> float:
        """The sum of the known parts."""
        parts = (self.detect, self.wait, self.agree, self.rebuild, self.transfer, self.redo)
        return sum(part for part in parts if part is not None)

    @property
    def done(self) -> bool:
        """True if training continues, or the next recovery has begun."""
        return self.rebuild is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "is_failure": self.is_failure,
            "cost": self.cost,
            "done": self.done,
        }


@dataclass(frozen=True)
class RecoveryTotals:
    """All recoveries of a job: how many, how many from failures, and the cost of those."""

    changes: int = 0
    failures: int = 0
    failures_cost: float = 0.0

    def plus(self, one: Recovery) -> RecoveryTotals:
        cost = one.cost if one.is_failure else 0.0
        return RecoveryTotals(
            self.changes + 1, self.failures + one.is_failure, self.failures_cost + cost
        )


class Recoveries:
    """Computes recoveries from a job's records. Feed it each record before `goodput`, whose steps
    it uses."""

    def __init__(self, goodput: GoodputFold) -> None:
        self._goodput = goodput
        self._known: deque[Recovery] = deque()
        #: Of those that are not kept any more.
        self._dropped = RecoveryTotals()
        self._generation = -1
        self._now: Recovery | None = None
        self._saw = _Seen()
        self._over = 0.0
        #: Since when there are too few nodes, and seconds with too few before that.
        self._waits: float | None = None
        self._waited = 0.0
        self._formed = 0.0
        #: Training was seen to start, not only processes.
        self._trained = False
        #: The last generation whose first failure the leader has named.
        self._verdict = -1
        #: Seconds of redone steps before the current recovery.
        self._redone = 0.0

    def feed(self, record: Record) -> None:
        """Take one more record."""
        generation = record.generation if record.generation is not None else -1
        match record.event:
            case events.WorldFormed() as formed if generation > self._generation:
                self._world(record, formed)
            case events.Waiting(enough=enough) if self._ended:
                self._wait(record.time, enough)
            case events.NodeLost(name=name, reason=why) if not self._ended:
                self._saw.failure(record, f"{name} was lost: {why}", guessed=True)
            case events.WorkerKilled():
                self._saw.hung = True
            case events.RestartDecided() as decided:
                self._judged(decided)
            case events.JobEnded(exitcode=0):
                self._cut_short(record.time)
        if generation == self._generation:
            self._take_of_world(record)

    def views(self) -> tuple[Recovery, ...]:
        """Return the recoveries, the oldest first."""
        self._finish()
        return tuple(self._known)

    def totals(self) -> RecoveryTotals:
        """Return the totals over all recoveries, those that are not kept included."""
        return reduce(RecoveryTotals.plus, self.views(), self._dropped)

    @property
    def _ended(self) -> bool:
        """True if the last world has ended and the next is not formed."""
        return self._now is not None and self._now.agree is None

    def _take_of_world(self, record: Record) -> None:
        match record.event:
            case events.WorkerFailed(failure=failure) if not self._ended:
                message = str(failure.get("message", ""))
                self._saw.failure(record, message, failure, guessed=self._saw.hung)
            case events.WorkerFailed(failure=failure):
                # Peers often report a broken connection before the worker has died.
                self._saw.failures.append(failure)
            case events.WorldChanging(reason=why):
                self._saw.change = why
            case events.GenerationOver(kind=kind, reason=why, cause=cause) if not self._ended:
                self._end(record, kind, why, cause)
            case events.Training(fetched=fetched):
                self._trained = True
                self._runs(record.time, fetched)
            case events.WorkersStarted() if not self._trained:
                self._runs(record.time, 0.0)
            case events.Progress() as progress if not self._trained:
                self._stepped(record, progress)

    def _end(
        self, record: Record, kind: str, why: str, cause: Mapping[str, Any] | None = None
    ) -> None:
        self._cut_short(record.time)
        self._finish()
        self._now = None
        if kind in ("finished", "stop"):
            return
        self._over, self._redone = record.time, self._goodput.redone
        self._waits, self._waited = None, 0.0
        self._now = Recovery(
            generation=self._generation,
            wall=record.wall,
            kind=kind,
            why=why,
            failure=cause or self._saw.cause(why),
        )
        self._known.append(self._now)
        if len(self._known) > RECOVERIES_LIMIT:
            self._dropped = self._dropped.plus(self._known.popleft())

    def _cut_short(self, over: float) -> None:
        """End a recovery whose world ends, too, before training was seen in it."""
        if self._now is not None and not self._ended and not self._now.done:
            until = over if self._saw.at is None else min(over, self._saw.at)
            self._set(rebuild=max(0.0, until - self._formed))

    def _judged(self, decided: events.RestartDecided) -> None:
        """Take the leader's verdict after all nodes reported: the first failure seen may be a
        consequence of a node that was lost or left."""
        kind, cause = decided.kind, decided.cause
        if self._now is None or (cause is None and (not kind or kind in DISRUPTIONS)):
            return
        of_it = self._ended if cause is None else cause.get("generation") == self._now.generation
        if of_it:
            self._set(kind=kind or self._now.kind, failure=cause)
            self._verdict = self._now.generation

    def _world(self, record: Record, formed: events.WorldFormed) -> None:
        if self._generation >= 0:
            if not self._ended:
                kind = "resize" if self._saw.change and self._saw.at is None else "unknown"
                self._end(record, kind, self._saw.change or self._saw.why or formed.reason)
            self._wait(record.time, enough=True)
            # The leader knows better now than when it ended the generation.
            if self._verdict == self._generation:
                self._set(why=formed.reason)
            elif (cause := self._saw.cause(formed.reason)) is not None:
                self._set(failure=cause, why=formed.reason)
            self._set(
                detect=self._saw.unnoticed(self._over, self._goodput.due),
                wait=self._waited,
                agree=max(0.0, record.time - self._over - self._waited),
            )
        assert record.generation is not None, "a world has a generation"
        self._generation, self._formed = record.generation, record.time
        self._saw, self._trained = _Seen(), False

    def _wait(self, time: float, enough: bool) -> None:
        """Start waiting with too few nodes, or stop with enough."""
        if not enough and self._waits is None:
            self._waits = time
        elif enough and self._waits is not None:
            self._waited, self._waits = self._waited + time - self._waits, None

    def _runs(self, time: float, fetched: float) -> None:
        """Note that training continues in the next world; the last worker counts."""
        if self._now is None or self._now.generation == self._generation:
            return
        transfer = max(self._now.transfer or 0.0, fetched)
        self._set(rebuild=max(0.0, time - self._formed - transfer), transfer=transfer)

    def _stepped(self, record: Record, progress: events.Progress) -> None:
        """Note the first step of a script that reports its steps: training has started."""
        entered = [pair for pair in zip(progress.steps, progress.at, strict=False) if pair[0] >= 0]
        if entered:
            self._trained = True
            at = min(at for _, at in entered) + record.time - record.mono
            workers = max(1, len(progress.ranks))
            self._runs(max(at, self._formed), progress.stalls.get("restore", 0.0) / workers)

    def _finish(self) -> None:
        """Update `redo`, which becomes more exact as training continues.

        It stays None if steps, or the step at which the script continued, are unknown: 0 would be
        wrong.
        """
        if self._now is not None and self._now.done and self._goodput.steps_known:
            known = self._goodput.redone_known
            self._set(redo=max(0.0, self._goodput.redone - self._redone) if known else None)

    def _set(self, **changes: Any) -> None:
        if self._now is not None:
            self._now = self._known[-1] = replace(self._now, **changes)


@dataclass
class _Seen:
    """Evidence of the end of a generation, before the leader reports it."""

    at: float | None = None
    why: str = ""
    #: The time of the failure is unknown: a node went silent, or a worker hung.
    guessed: bool = False
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    #: Which nodes join or leave, if that ends the generation.
    change: str = ""
    #: An agent killed a hung worker. Often a peer is the first to report a failure.
    hung: bool = False

    def failure(
        self,
        record: Record,
        why: str,
        failure: Mapping[str, Any] | None = None,
        *,
        guessed: bool = False,
    ) -> None:
        """Take a failure; the time of the first one counts."""
        if failure is not None:
            self.failures.append(failure)
        if self.at is None:
            self.at, self.why, self.guessed = record.time, why, guessed

    def cause(self, reason: str) -> Mapping[str, Any] | None:
        """Return the failure that the leader names in its reason, or else the first one."""
        for failure in self.failures:
            if reason.startswith(f"rank {failure.get('rank')} on {failure.get('node')} ("):
                return failure
        return self.failures[0] if self.failures else None

    def unnoticed(self, over: float, due: float | None) -> float:
        """Return the seconds from the failure to the end of the generation.

        A failure at an unknown time happened, at the latest, when the step in flight was due.
        """
        if self.at is None:
            return 0.0
        moment = min(self.at, due) if self.guessed and due is not None else self.at
        return max(0.0, over - moment)
