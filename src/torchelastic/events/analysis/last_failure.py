"""The last failure of a job: the first cause and its consequences. Pure.

The leader, which has the reports of all nodes, decides what failed first. Its verdict is in its
events and in the last event of every agent. Until then, the first failure seen counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis import hangs
from torchelastic.events.failure import Failure
from torchelastic.events.record import Record
from torchelastic.events.timeline import DISRUPTIONS

#: Consequences that are kept.
CONSEQUENCES_LIMIT = 32


@dataclass(frozen=True, kw_only=True)
class FailureView:
    """A failure of the job, from which it may have recovered."""

    #: The generation that it ended.
    generation: int
    #: Wall clock of its first report.
    wall: float
    #: What failed and how, in one line.
    sentence: str
    cause: Failure
    #: In the order in which they became known.
    consequences: tuple[Failure, ...] = ()
    #: If the failure is a hang: where the ranks were, and which were missing.
    hang: Mapping[str, Any] | None = None


@dataclass
class _Case:
    """The reports of one failure of the job."""

    generation: int
    wall: float
    seen: list[Failure] = field(default_factory=list)
    #: The leader's verdict: when it ends the generation, and again when all nodes have reported.
    cause: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    #: All nodes have reported.
    closed: bool = False

    def view(self) -> FailureView:
        cause = self.cause or self.seen[0]
        known = [*self.consequences, *self.seen]
        others = [
            one
            for place, one in enumerate(known)
            if not any(_same(one, other) for other in (cause, *known[:place]))
        ]
        return FailureView(
            generation=self.generation,
            wall=self.wall,
            sentence=cause.sentence(),
            cause=self._in_full(cause),
            consequences=tuple(self._in_full(one) for one in others[:CONSEQUENCES_LIMIT]),
        )

    def _in_full(self, failure: Failure) -> Failure:
        """Return the failure as reported by its own agent: the leader's copy is cut."""
        full = next((one for one in self.seen if _same(one, failure)), failure)
        return replace(full, by_itself=failure.by_itself)


class Failures:
    """Takes a job's records one by one."""

    def __init__(self) -> None:
        self._last: _Case | None = None
        #: The one before, in case the last turns out not to be a failure.
        self._before: _Case | None = None
        #: The last hang, and its generation: it is reported before a worker is killed for it.
        self._hang: tuple[int, Mapping[str, Any] | None] = (-1, None)

    def feed(self, record: Record) -> None:
        """Take one more record."""
        generation = record.generation if record.generation is not None else -1
        match record.event:
            case events.Hang() as hang:
                self._hang = generation, hangs.part(hang)
            case events.WorkerFailed(failure=data):
                self._seen(record, Failure.from_json({"generation": generation, **data}))
            case events.GenerationOver(cause=data) if data is not None:
                self._judged(record, data)
            case events.RestartDecided(kind=kind) if kind and kind not in DISRUPTIONS:
                self._acquitted()
            case events.RestartDecided(cause=data, consequences=others) if data is not None:
                self._judged(record, data, others, finally_=True)
            case events.JobEnded(cause=data) if data is not None:
                self._judged(record, data, finally_=True)

    def view(self) -> FailureView | None:
        """The last one, if there was any."""
        if self._last is None:
            return None
        generation, hang = self._hang
        seen = self._last.view()
        return replace(seen, hang=hang) if seen.generation == generation else seen

    def _seen(self, record: Record, failure: Failure) -> None:
        if failure.stopped:
            return  # stopped by its own agent
        case = self._case(record, failure.generation)
        if case is not None and len(case.seen) <= CONSEQUENCES_LIMIT:
            case.seen.append(failure)

    def _judged(
        self,
        record: Record,
        data: events.Json,
        others: Sequence[events.Json] = (),
        *,
        finally_: bool = False,
    ) -> None:
        cause = Failure.from_json(data)
        case = self._case(record, cause.generation)
        if case is not None:
            case.cause, case.closed = cause, case.closed or finally_
            case.consequences = tuple(map(Failure.from_json, others)) or case.consequences

    def _acquitted(self) -> None:
        """Drop the case: nothing failed, connections broke because a node left."""
        if self._last is not None and not self._last.closed:
            self._last = self._before

    def _case(self, record: Record, generation: int) -> _Case | None:
        """Return the case of a generation; None if it is older than the last."""
        if self._last is None or self._last.generation < generation:
            self._before = self._last
            self._last = _Case(generation, record.wall)
        return self._last if self._last.generation == generation else None


def _same(one: Failure, other: Failure) -> bool:
    """Return True if both are reports of the same failure."""
    theirs = (other.generation, other.node, other.rank, other.local_rank, other.pid)
    return (one.generation, one.node, one.rank, one.local_rank, one.pid) == theirs
