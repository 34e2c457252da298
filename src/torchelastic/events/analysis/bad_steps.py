"""The steps of a job that had bad numbers, and their samples (`torchelastic.Guard`). Pure.

Every rank reports a bad step. When a later generation continues from an earlier step, a bad step is
undone like any other: its samples come again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.record import Record

#: What is done about a step whose samples are listed as skipped.
LEAVES_OUT = ("skip", "stop")
#: Bad steps that a view has, ranks of each that are named, and samples of each rank.
STEPS_LIMIT, RANKS_LIMIT, SAMPLES_LIMIT = 20, 8, 64


@dataclass(frozen=True, kw_only=True)
class BadRank:
    """A rank whose own numbers were bad."""

    rank: int
    #: The first of its samples, and the number of all.
    ids: tuple[Any, ...] = ()
    samples: int = 0
    #: With a fixed batch: its micro-batches whose own numbers were bad.
    micro_batches: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BadStepView:
    """A step with bad numbers."""

    generation: int
    #: The number of the step: the first is 1.
    step: int
    #: Wall clock of its first report.
    wall: float
    reason: str
    #: Texts if they are not finite, as in the event.
    norm: float | str
    loss: float | str | None
    deviation: float
    action: str
    #: The first ranks whose own numbers were bad, if any are known, and the number of all.
    origins: tuple[BadRank, ...] = ()
    ranks: int = 0
    #: The epochs and ranges of positions whose samples all ranks took together.
    spans: tuple[tuple[int, int, int], ...] = ()
    #: Samples of all ranks.
    samples: int = 0
    #: A later generation has continued from an earlier step.
    undone: bool = False


class BadSteps:
    """Takes a job's records one by one."""

    def __init__(self, limit: int | None = STEPS_LIMIT) -> None:
        self._steps: deque[BadStepView] = deque(maxlen=limit)
        #: Bad steps so far, also those that are not kept.
        self.total = 0
        #: By generation: the smallest number of steps that it is known to have begun with.
        self._bases: dict[int, int] = {}

    @property
    def views(self) -> tuple[BadStepView, ...]:
        """The latest bad steps, the oldest first."""
        return tuple(self._steps)

    def feed(self, record: Record) -> None:
        """Take one more record."""
        if record.generation is None:
            return
        match record.event:
            case events.StepSkipped() as bad:
                self._continues(record.generation, bad.step - 1)
                self._report(record, record.generation, bad)
            case events.Training(step=step):
                self._continues(record.generation, step)
            case events.Progress(steps=steps, before=None) if any(step >= 0 for step in steps):
                self._continues(record.generation, min(step for step in steps if step >= 0))

    def _report(self, record: Record, generation: int, bad: events.StepSkipped) -> None:
        key = generation, bad.step, bad.action
        for place in reversed(range(len(self._steps))):
            one = self._steps[place]
            if (one.generation, one.step, one.action) == key:
                self._steps[place] = _with_report(one, bad)
                return
        new = BadStepView(
            generation=generation,
            step=bad.step,
            wall=record.wall,
            reason=bad.reason,
            norm=bad.norm,
            loss=bad.loss,
            deviation=bad.deviation,
            action=bad.action,
        )
        for later, base in self._bases.items():
            new = _undone(new, later, base)
        # A step that was repeated is one step.
        self.total += all((one.generation, one.step) != key[:2] for one in self._steps)
        self._steps.append(_with_report(new, bad))

    def _continues(self, generation: int, base: int) -> None:
        """Note that a generation continued from this step: it undoes later ones of older ones."""
        if base >= self._bases.get(generation, base + 1):
            return
        self._bases[generation] = base
        for place, one in enumerate(self._steps):
            self._steps[place] = _undone(one, generation, base)


def _undone(seen: BadStepView, generation: int, base: int) -> BadStepView:
    """Return the view, given that this generation continued from this step."""
    is_undone = seen.generation < generation and seen.step > base
    return replace(seen, undone=True) if is_undone else seen


def _with_report(seen: BadStepView, bad: events.StepSkipped) -> BadStepView:
    """Return the view with the report of a rank; a rank may need several for its samples."""
    ids = ids_of(bad)
    spans = tuple(dict.fromkeys((*seen.spans, *map(_span, bad.samples))))
    seen = replace(seen, spans=spans, samples=sum(end - start for _, start, end in spans))
    if not bad.is_origin:
        return seen
    origins = {one.rank: one for one in seen.origins}
    known = origins.get(bad.rank)
    if known is None:
        seen = replace(seen, ranks=seen.ranks + 1)
        known = BadRank(rank=bad.rank, micro_batches=tuple(bad.micro_batches))
    more = (*known.ids, *ids)[:SAMPLES_LIMIT]
    origins[bad.rank] = replace(known, ids=more, samples=known.samples + len(ids))
    first = [origins[rank] for rank in sorted(origins)][:RANKS_LIMIT]
    return replace(seen, origins=tuple(first))


def _span(part: events.Json) -> tuple[int, int, int]:
    match part.get("epoch"), _list(part.get("span")):
        case int(epoch), [int(start), int(end)]:
            return epoch, start, end
    return 0, 0, 0


def ids_of(bad: events.StepSkipped) -> list[Any]:
    """The samples of a report: their numbers or, of a stream, pairs of shard and number."""
    return [sample for part in bad.samples for sample in _list(part.get("ids"))]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


# --- skipped samples ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkippedSample:
    """A sample of a bad step that was not repeated, nor undone later."""

    #: Its number; of a stream, its shard and its number there.
    id: Any
    epoch: int
    step: int
    rank: int
    #: The rank's own numbers were bad.
    origin: bool
    #: What was done about the step.
    action: str


@dataclass(frozen=True)
class Skipped:
    """The samples that a job left out, each once, in the order of steps."""

    samples: tuple[SkippedSample, ...]
    #: Samples that are in no log here: only the leader has the events of all ranks.
    missing: int


def skipped_samples(records: Sequence[Record]) -> Skipped:
    """Return the samples that a job left out, from its records in the order of time."""
    steps = BadSteps(limit=None)
    for record in records:
        steps.feed(record)
    kept = {
        (one.generation, one.step, one.action): one
        for one in steps.views
        if one.action in LEAVES_OUT and not one.undone
    }
    found: dict[tuple[int, int, str], SkippedSample] = {}
    for record in records:
        match record.event:
            case events.StepSkipped() as bad if (record.generation, bad.step, bad.action) in kept:
                for one in _samples_of(bad):
                    # The ranks that hold one model between them have the same samples.
                    key = one.step, one.epoch, str(one.id)
                    if one.origin or key not in found:
                        found[key] = one
    samples = sorted(found.values(), key=lambda one: (one.step, one.rank))
    missing = sum(one.samples for one in kept.values()) - len(samples)
    return Skipped(tuple(samples), max(0, missing))


def _samples_of(bad: events.StepSkipped) -> Iterator[SkippedSample]:
    for part in bad.samples:
        for sample in _list(part.get("ids")):
            place = part.get("epoch", 0), bad.step, bad.rank
            yield SkippedSample(sample, *place, bad.is_origin, bad.action)
