"""What each change of the world cost, from its cause to where training was before. Pure.

cause ──detect──> generation over ──(wait)──agree──> next world ──rebuild, transfer──> training
                                                                          ──redo──> as far again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis.goodput import DISRUPTIONS, GoodputFold
from torchelastic.events.record import Record

#: The last ones that are kept.
KEPT = 50


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From one world to the next. Seconds; None where it is not there yet, or cannot be known."""

    #: The generation that ended.
    generation: int
    #: Wall clock of its end.
    wall: float
    #: What ended it, as in `restart-decided`, until then as in `generation-over`; `unknown` where
    #: the leader was not heard.
    kind: str
    why: str
    #: The first failure that was seen, as in `worker-failed`.
    failure: Mapping[str, Any] | None = None
    #: From the failure, as far as that is known, to the end of the generation.
    detect: float = 0.0
    #: Below the minimum of nodes.
    wait: float = 0.0
    agree: float | None = None
    #: From the next world to training, without the transfer.
    rebuild: float | None = None
    transfer: float | None = None
    #: Spent on steps that were lost: so long it takes to be as far again.
    redo: float | None = None

    @property
    def is_failure(self) -> bool:
        return self.kind in DISRUPTIONS or (self.kind == "unknown" and self.failure is not None)

    @property
    def cost(self) -> float:
        """All of it, as far as it is known."""
        parts = (self.detect, self.wait, self.agree, self.rebuild, self.transfer, self.redo)
        return sum(part for part in parts if part is not None)

    @property
    def done(self) -> bool:
        """Whether training goes on."""
        return self.rebuild is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "is_failure": self.is_failure,
            "cost": self.cost,
            "done": self.done,
        }


class Recoveries:
    """Takes a job's records one by one. Each before `goodput` does, whose view of steps it uses."""

    def __init__(self, goodput: GoodputFold) -> None:
        self._goodput = goodput
        self._known: deque[Recovery] = deque(maxlen=KEPT)
        self._generation = -1
        self._now: Recovery | None = None
        self._saw = _Seen()
        self._over = 0.0
        #: Since when too few nodes are there, and seconds that were too few before.
        self._waits: float | None = None
        self._waited = 0.0
        self._formed = 0.0
        #: Whether training itself was seen to begin, not only processes.
        self._trained = False
        #: The last generation of whose end the leader has named the first failure.
        self._verdict = -1
        #: Seconds of redone steps before the present recovery.
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
        if generation == self._generation:
            self._take_of_world(record)

    def views(self) -> tuple[Recovery, ...]:
        """All that are known, the oldest first."""
        self._finish()
        return tuple(self._known)

    @property
    def _ended(self) -> bool:
        """Whether the last world is over, and no next one has been formed."""
        return self._now is not None and self._now.agree is None

    def _take_of_world(self, record: Record) -> None:
        match record.event:
            case events.WorkerFailed(failure=failure) if not self._ended:
                message = str(failure.get("message", ""))
                self._saw.failure(record, message, failure, guessed=self._saw.hung)
            case events.WorkerFailed(failure=failure):
                # Peers often tell of a broken connection before the worker is done dying.
                self._saw.told.append(failure)
            case events.WorldChanging(reason=why):
                self._saw.change = why
            case events.GenerationOver(kind=kind, reason=why, cause=told) if not self._ended:
                self._end(record, kind, why, told)
            case events.Training(fetched=fetched):
                self._trained = True
                self._runs(record.time, fetched)
            case events.WorkersStarted() if not self._trained:
                self._runs(record.time, 0.0)
            case events.Progress() as progress if not self._trained:
                self._stepped(record, progress)

    def _end(
        self, record: Record, kind: str, why: str, told: Mapping[str, Any] | None = None
    ) -> None:
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
            failure=told or self._saw.cause(why),
        )
        self._known.append(self._now)

    def _judged(self, decided: events.RestartDecided) -> None:
        """The leader's last word, now that all have spoken: who is heard first may have fallen
        because of a node that is gone, or of one that left."""
        kind, told = decided.kind, decided.cause
        if self._now is None or (told is None and (not kind or kind in DISRUPTIONS)):
            return
        of_it = self._ended if told is None else told.get("generation") == self._now.generation
        if of_it:
            self._set(kind=kind or self._now.kind, failure=told)
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
        """Too few nodes are left, or there are enough again."""
        if not enough and self._waits is None:
            self._waits = time
        elif enough and self._waits is not None:
            self._waited, self._waits = self._waited + time - self._waits, None

    def _runs(self, time: float, fetched: float) -> None:
        """Training goes on in the next world; said by every worker, the last one counts."""
        if self._now is None or self._now.generation == self._generation:
            return
        transfer = max(self._now.transfer or 0.0, fetched)
        self._set(rebuild=max(0.0, time - self._formed - transfer), transfer=transfer)

    def _stepped(self, record: Record, progress: events.Progress) -> None:
        """A script that tells its steps: it has started when it enters the first one."""
        entered = [pair for pair in zip(progress.steps, progress.at, strict=False) if pair[0] >= 0]
        if entered:
            self._trained = True
            at = min(at for _, at in entered) + record.time - record.mono
            workers = max(1, len(progress.ranks))
            self._runs(max(at, self._formed), progress.stalls.get("restore", 0.0) / workers)

    def _finish(self) -> None:
        """How much was lost is known when training goes on, and better as it does.

        Of a script whose steps nobody knows, or not from which one it went on, it never is: it
        would be wrong to say that nothing was.
        """
        if self._now is not None and self._now.done and self._goodput.steps_known:
            known = self._goodput.redone_known
            self._set(redo=max(0.0, self._goodput.redone - self._redone) if known else None)

    def _set(self, **changes: Any) -> None:
        if self._now is not None:
            self._now = self._known[-1] = replace(self._now, **changes)


@dataclass
class _Seen:
    """What was seen of the end of a generation, before its leader said so."""

    at: float | None = None
    why: str = ""
    #: Nobody saw the moment it happened: a node went silent, a worker hung.
    guessed: bool = False
    told: list[Mapping[str, Any]] = field(default_factory=list)
    #: Who joins or leaves, where that is what ends it.
    change: str = ""
    #: An agent has killed a worker because it hung. Often a peer of it is the first to tell.
    hung: bool = False

    def failure(
        self,
        record: Record,
        why: str,
        told: Mapping[str, Any] | None = None,
        *,
        guessed: bool = False,
    ) -> None:
        """The first one counts."""
        if told is not None:
            self.told.append(told)
        if self.at is None:
            self.at, self.why, self.guessed = record.time, why, guessed

    def cause(self, reason: str) -> Mapping[str, Any] | None:
        """The failure that the leader names in its reason; the first one if it names none."""
        for failure in self.told:
            if reason.startswith(f"rank {failure.get('rank')} on {failure.get('node')} ("):
                return failure
        return self.told[0] if self.told else None

    def unnoticed(self, over: float, due: float | None) -> float:
        """Seconds from the failure to the end of the generation.

        One that nobody saw came, at the latest, when the step in flight should have been done.
        """
        if self.at is None:
            return 0.0
        moment = min(self.at, due) if self.guessed and due is not None else self.at
        return max(0.0, over - moment)
