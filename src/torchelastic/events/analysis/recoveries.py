"""Recoveries: the cost of each change of the world, until training is as far as before. Pure.

cause ──detect──> generation over ──(wait)──agree──> next world ──rebuild, transfer──> training
                                                                          ──redo──> as far again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from torchelastic.events.analysis.goodput import GoodputFold
from torchelastic.events.record import Record
from torchelastic.events.timeline import DISRUPTIONS, ENDS, Generation, Timeline

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


def recovery(
    ended: Generation,
    following: Generation | None,
    *,
    due: float | None = None,
    redo: float | None = None,
) -> Recovery:
    """Return the recovery from a generation that has ended into the following one, if any.

    `due`: when its step in flight should have been done.
    """
    assert ended.ended is not None, "the generation has ended"
    assert ended.ended_wall is not None, "it ended at some time"
    found = Recovery(
        generation=ended.number,
        wall=ended.ended_wall,
        kind=ended.kind,
        why=ended.why,
        failure=ended.cause,
    )
    if following is None:
        return found
    found = replace(
        found,
        detect=_unnoticed(ended, due),
        wait=ended.waited,
        agree=max(0.0, following.formed - ended.ended - ended.waited),
    )
    if following.resumed is not None:
        spent = following.resumed - following.formed - following.transfer
        return replace(found, rebuild=max(0.0, spent), transfer=following.transfer, redo=redo)
    end = following.ended if following.kind else following.succeeded
    if end is not None:  # before training was seen in it
        until = min(end, following.hurt if following.hurt is not None else end)
        return replace(found, rebuild=max(0.0, until - following.formed), redo=redo)
    return found


def _unnoticed(ended: Generation, due: float | None) -> float:
    """Return the seconds from the failure to the end of a generation.

    A failure at an unknown time happened, at the latest, when the step in flight was due.
    """
    if ended.hurt is None or ended.ended is None:
        return 0.0
    moment = min(ended.hurt, due) if ended.guessed and due is not None else ended.hurt
    return max(0.0, ended.ended - moment)


class Recoveries:
    """The recoveries of a job: each from the generations of the timeline, and from `goodput`, whose
    steps it uses. Feed it each record after the timeline and before `goodput`."""

    def __init__(self, timeline: Timeline, goodput: GoodputFold) -> None:
        self._timeline, self._goodput = timeline, goodput
        #: The recoveries before the last one, and those that are not kept any more.
        self._past: deque[Recovery] = deque()
        self._dropped = RecoveryTotals()
        #: The last one: the generation that ended, and the next, if it is formed.
        self._ended: Generation | None = None
        self._following: Generation | None = None
        self._due: float | None = None
        #: Seconds of redone steps before it.
        self._redone = 0.0

    def feed(self, record: Record) -> None:
        """Take one more record."""
        current, previous = self._timeline.current, self._timeline.previous
        if current.over is not None:
            self._open(current)
        elif self._timeline.began and previous.number >= 0:
            self._open(previous)
            self._following, self._due = current, self._goodput.due

    def _open(self, ended: Generation) -> None:
        """Begin the recovery from a generation, unless it is begun; the last one is complete."""
        if ended is self._ended:
            return
        self._past.extend(self._last())
        self._ended, self._following, self._redone = ended, None, self._goodput.redone
        if len(self._past) + len(self._last()) > RECOVERIES_LIMIT:
            self._dropped = self._dropped.plus(self._past.popleft())

    def _last(self) -> list[Recovery]:
        """Return the last recovery; none if the generation that ended was the last one."""
        if self._ended is None or self._ended.kind in ENDS:
            return []
        # More exact as training continues; None if steps, or the step at which the script
        # continued, are unknown: 0 would be wrong.
        known = self._goodput.steps_known and self._goodput.redone_known
        redo = max(0.0, self._goodput.redone - self._redone) if known else None
        return [recovery(self._ended, self._following, due=self._due, redo=redo)]

    def views(self) -> tuple[Recovery, ...]:
        """Return the recoveries, the oldest first."""
        return (*self._past, *self._last())

    def totals(self) -> RecoveryTotals:
        """Return the totals over all recoveries, those that are not kept included."""
        return reduce(RecoveryTotals.plus, self.views(), self._dropped)
