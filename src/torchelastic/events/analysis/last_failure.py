"""The last failure of a job: what came first, and what fell because of it. Pure.

Who failed first is judged by the leader, who has heard everybody; its verdict is in its events, and
in what every agent says at the end. Until it has spoken, the first failure that was seen stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis import hangs
from torchelastic.events.failure import Failure
from torchelastic.events.record import Record

#: Consequences that are kept.
KEPT = 32
#: The ends of a generation that have a first failure.
FAILURES = ("failure", "error", "node-failure")


@dataclass(frozen=True, kw_only=True)
class FailureView:
    """A failure of the job, from which it may have recovered."""

    #: The generation that ended by it.
    generation: int
    #: Wall clock of the first word of it.
    wall: float
    #: What failed and how, in a line.
    sentence: str
    cause: Failure
    #: In the order in which they became known.
    consequences: tuple[Failure, ...] = ()
    #: Where the ranks were and who was missing, if the failure is a hang.
    hang: Mapping[str, Any] | None = None


@dataclass
class _Case:
    """What was seen of one failure of the job."""

    generation: int
    wall: float
    seen: list[Failure] = field(default_factory=list)
    #: What the leader says of it, first when it ends the generation, then when all have spoken.
    cause: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    #: All have spoken.
    closed: bool = False

    def view(self) -> FailureView:
        cause = self.cause or self.seen[0]
        told = [*self.consequences, *self.seen]
        others = [
            one
            for place, one in enumerate(told)
            if not any(_same(one, other) for other in (cause, *told[:place]))
        ]
        return FailureView(
            generation=self.generation,
            wall=self.wall,
            sentence=cause.sentence(),
            cause=self._in_full(cause),
            consequences=tuple(self._in_full(one) for one in others[:KEPT]),
        )

    def _in_full(self, failure: Failure) -> Failure:
        """As its own agent told it: what the leader sends to every node is cut short."""
        told = next((one for one in self.seen if _same(one, failure)), failure)
        return replace(told, by_itself=failure.by_itself)


class Failures:
    """Takes a job's records one by one."""

    def __init__(self) -> None:
        self._last: _Case | None = None
        #: The one before it, for the case that there was no failure after all.
        self._before: _Case | None = None
        #: The last hang, and its generation: it is told before a worker is killed for it.
        self._hang: tuple[int, Mapping[str, Any] | None] = (-1, None)

    def feed(self, record: Record) -> None:
        """Take one more record."""
        generation = record.generation if record.generation is not None else -1
        match record.event:
            case events.Hang() as hang:
                self._hang = generation, hangs.part(hang)
            case events.WorkerFailed(failure=told):
                self._seen(record, Failure.from_json({"generation": generation, **told}))
            case events.GenerationOver(cause=told) if told is not None:
                self._judged(record, told)
            case events.RestartDecided(kind=kind) if kind and kind not in FAILURES:
                self._acquitted()
            case events.RestartDecided(cause=told, consequences=others) if told is not None:
                self._judged(record, told, others, finally_=True)
            case events.JobEnded(cause=told) if told is not None:
                self._judged(record, told, finally_=True)

    def view(self) -> FailureView | None:
        """The last one, if there was any."""
        if self._last is None:
            return None
        generation, hang = self._hang
        seen = self._last.view()
        return replace(seen, hang=hang) if seen.generation == generation else seen

    def _seen(self, record: Record, failure: Failure) -> None:
        if failure.stopped:
            return  # by its own agent: it tells of nothing that went wrong
        case = self._case(record, failure.generation)
        if case is not None and len(case.seen) <= KEPT:
            case.seen.append(failure)

    def _judged(
        self,
        record: Record,
        told: events.Json,
        others: Sequence[events.Json] = (),
        *,
        finally_: bool = False,
    ) -> None:
        cause = Failure.from_json(told)
        case = self._case(record, cause.generation)
        if case is not None:
            case.cause, case.closed = cause, case.closed or finally_
            case.consequences = tuple(map(Failure.from_json, others)) or case.consequences

    def _acquitted(self) -> None:
        """Nothing failed: who told of a broken connection did so because somebody left."""
        if self._last is not None and not self._last.closed:
            self._last = self._before

    def _case(self, record: Record, generation: int) -> _Case | None:
        """That of a generation; None for one older than the last, which nobody asks for."""
        if self._last is None or self._last.generation < generation:
            self._before = self._last
            self._last = _Case(generation, record.wall)
        return self._last if self._last.generation == generation else None


def _same(one: Failure, other: Failure) -> bool:
    """Whether both tell of the same end of the same worker, or node."""
    theirs = (other.generation, other.node, other.rank, other.local_rank, other.pid)
    return (one.generation, one.node, one.rank, one.local_rank, one.pid) == theirs
