"""Check that committed steps used every sample exactly once in each epoch, or skipped it. Pure.

Not every line is valid. When a worker is lost, the others may roll back: steps committed beyond the
step they continue from are void, and their samples come again. The first line of a generation shows
where it continued. So a line is valid if no later generation has a line of the same or an earlier
step. A restarted job may count its generations from 0 again: a later `start` voids lines
in the same way, whatever its generation numbers are.

A rank that was killed after its gradients were exchanged, but before it committed, has used samples
of a valid step and wrote no line. The lines of its peers contain the number of positions that the
step took (`span`). These samples are *unwitnessed*: their number is known, their ids are not. If
the spans of an epoch cover its order without gap or overlap, and the number of samples in no line
equals the number of unwitnessed samples, then these are the same samples, because an order contains
each sample once. Such a rank has no later line in its generation: a rank that has one was not
killed, and its missing line is an error.

All ranks skip a step with bad numbers (`torchelastic.Guard`), and their lines say so. Its samples
are not used, but must not come again in the epoch: they are checked like used ones, and listed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: A sample: its number, or its shard and its number there.
Sample = int | tuple[int, int]
Span = tuple[int, int]
#: Start and generation; a later world compares greater.
WorldId = tuple[int, int]

#: The most samples of a kind that a report names.
_MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Line:
    """The samples that one rank used for one committed step."""

    generation: int
    step: int
    rank: int
    epoch: int
    ids: tuple[Sample, ...]
    size: int | None = None
    span: Span | None = None
    #: The step had bad numbers: nothing of it was kept.
    skipped: bool = False
    #: The start of the job that wrote it, counted from 0.
    start: int = 0

    @property
    def world(self) -> WorldId:
        return self.start, self.generation

    def __str__(self) -> str:
        start = f" of start {self.start}" if self.start else ""
        return f"step {self.step} of generation {self.generation}{start} (rank {self.rank})"


class LedgerHistory(NamedTuple):
    """Valid lines, and lines that a later world has voided."""

    valid: list[Line]
    void: list[Line]


def split_valid(lines: Iterable[Line]) -> LedgerHistory:
    """Split lines into valid and void ones."""
    lines = list(lines)
    first: dict[WorldId, int] = {}
    for line in lines:
        first[line.world] = min(line.step, first.get(line.world, line.step))
    ends = _ends(first)
    history = LedgerHistory([], [])
    for line in lines:
        end = ends[line.world]
        (history.valid if end is None or line.step < end else history.void).append(line)
    return history


def _ends(first: Mapping[WorldId, int]) -> dict[WorldId, int | None]:
    """Return, for each world, the earliest step of any later world."""
    ends: dict[WorldId, int | None] = {}
    end: int | None = None
    for world in sorted(first, reverse=True):
        ends[world] = end
        end = first[world] if end is None else min(end, first[world])
    return ends


@dataclass(frozen=True, kw_only=True)
class EpochVerdict:
    """The result for the samples of one epoch."""

    epoch: int
    #: Samples in valid lines of steps that were not skipped.
    used: int
    #: Samples of skipped steps, each with its valid lines.
    skipped: Mapping[Sample, Sequence[Line]]
    #: Samples used by ranks that wrote no line.
    unwitnessed: int
    #: The number of samples the epoch must have; None if it need not be complete.
    of: int | None
    #: Each with the void lines that had it: its step was undone, and it never came again.
    missing: Mapping[Sample, Sequence[Line]]
    #: Each with the valid lines that have it.
    repeated: Mapping[Sample, Sequence[Line]]
    #: Other errors.
    contradictions: Sequence[str]

    @property
    def ok(self) -> bool:
        return not (self.missing or self.repeated or self.contradictions)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result for all epochs."""

    epochs: Sequence[EpochVerdict]
    valid: int
    void: int
    steps: int
    worlds: int
    #: Ranks of valid steps that wrote no line.
    absent: Sequence[str]
    #: Errors of worlds and their ranks.
    contradictions: Sequence[str]
    #: Lines that could not be written, and lines that are unreadable.
    lost: int = 0
    unreadable: int = 0

    @property
    def ok(self) -> bool:
        all_well = all(epoch.ok for epoch in self.epochs) and not self.contradictions
        return all_well and bool(self.epochs)

    def __str__(self) -> str:
        return "\n".join(_report(self))


def check(
    lines: Iterable[Line],
    *,
    expected: Collection[Sample] | None = None,
    epochs: int | None = None,
    dropped: int = 0,
    lost: int = 0,
    unreadable: int = 0,
) -> Verdict:
    """Check these lines, in any order.

    `expected` are the samples of an epoch (default: all numbers up to the largest seen). The first
    `epochs` epochs must be complete (default: all but the last seen). `dropped` samples of each
    epoch may be missing: `drop_last` leaves out up to a batch but one.
    """
    lines = list(lines)
    history = split_valid(lines)
    valid, void = _by_epoch(history.valid), _by_epoch(history.void)
    if expected is None:
        expected = _seen_up_to(history)
    elif not isinstance(expected, range):
        expected = set(expected)
    last = max(valid, default=0)
    complete = range(min(valid, default=0), last) if epochs is None else range(epochs)
    return Verdict(
        epochs=[
            _check_epoch(
                epoch,
                valid.get(epoch, []),
                void.get(epoch, []),
                expected if epoch in complete else None,
                known=expected,
                dropped=dropped,
            )
            for epoch in sorted({*valid, *complete})
        ],
        valid=len(history.valid),
        void=len(history.void),
        steps=len({line.step for line in history.valid}),
        worlds=len({line.world for line in history.valid + history.void}),
        absent=[_place(*one) for one in _absent(history.valid)],
        contradictions=[
            *_unequal_sizes(lines),
            *_half_skipped(history.valid),
            *_without_excuse(history.valid, lines, lost),
        ],
        lost=lost,
        unreadable=unreadable,
    )


def _check_epoch(
    epoch: int,
    lines: Sequence[Line],
    void: Sequence[Line],
    wanted: Collection[Sample] | None,
    *,
    known: Collection[Sample],
    dropped: int,
) -> EpochVerdict:
    uses = Counter(sample for line in lines for sample in line.ids)
    strange = [sample for sample in uses if sample not in known]
    contradictions = [f"unknown samples: {_named(strange)}"] if strange else []
    unwitnessed = 0
    if lines and all(line.span is not None for line in lines):
        unwitnessed, about_spans = _check_spans(lines)
        contradictions += about_spans
    missing: Collection[Sample] = ()
    if wanted is not None:
        unseen = [sample for sample in wanted if sample not in uses]
        missing = unseen if len(unseen) > unwitnessed + dropped else ()
        if len(unseen) < unwitnessed:
            contradictions.append(
                f"ranks that wrote no line used {unwitnessed} samples, but only {len(unseen)} "
                "samples are in no line: some were used twice"
            )
    skipped = {sample for line in lines if line.skipped for sample in line.ids}
    return EpochVerdict(
        epoch=epoch,
        used=len(uses) - len(skipped),
        skipped=_having(skipped, lines),
        unwitnessed=unwitnessed,
        of=None if wanted is None else len(wanted),
        missing=_having(missing, void),
        repeated=_having([sample for sample, times in uses.items() if times > 1], lines),
        contradictions=contradictions,
    )


def _having(samples: Collection[Sample], lines: Iterable[Line]) -> dict[Sample, list[Line]]:
    """Return the lines that contain each of these samples."""
    found: dict[Sample, list[Line]] = {sample: [] for sample in samples}
    for line in lines if found else ():
        for sample in line.ids:
            if sample in found:
                found[sample].append(line)
    return found


def _check_spans(lines: Sequence[Line]) -> tuple[int, list[str]]:
    """Return the number of unwitnessed samples, and errors in the spans of an epoch."""
    steps: dict[tuple[Span, WorldId, int], list[Line]] = defaultdict(list)
    for line in lines:
        if line.span is not None:
            steps[line.span, line.world, line.step].append(line)
    unwitnessed, end = 0, 0
    wrong: list[str] = []
    for key, of_step in sorted(steps.items(), key=lambda item: item[0]):
        span, count = key[0], sum(len(line.ids) for line in of_step)
        wrong += _about_span(span, of_step[0], count, end)
        unwitnessed += max(0, span[1] - span[0] - count)
        end = max(end, span[1])
    return unwitnessed, wrong


def _about_span(span: Span, line: Line, count: int, end: int) -> Iterator[str]:
    start, stop = span
    if start > end:
        yield f"no step used positions {end} to {start} of the order, before {line}"
    elif start < end:
        yield f"{line} used positions {start} to {min(end, stop)} of the order a second time"
    if count > stop - start:
        yield f"{line} covers {stop - start} positions, but its ranks used {count} samples"


def _absent(lines: Iterable[Line]) -> list[tuple[WorldId, int, int]]:
    """Return world, step and rank of each missing line of a valid step."""
    there: dict[tuple[WorldId, int, int], set[int]] = defaultdict(set)
    for line in lines:
        if line.size is not None:
            there[line.world, line.step, line.size].add(line.rank)
    return [
        (world, step, rank)
        for (world, step, size), ranks in sorted(there.items())
        for rank in range(size)
        if rank not in ranks
    ]


def _without_excuse(valid: Iterable[Line], lines: Iterable[Line], lost: int) -> Iterator[str]:
    """Report ranks that wrote no line of a step, but were alive in a later one."""
    latest: dict[tuple[WorldId, int], int] = {}
    for line in lines:
        key = line.world, line.rank
        latest[key] = max(line.step, latest.get(key, line.step))
    for world, step, rank in () if lost else _absent(valid):
        if latest.get((world, rank), step) > step:
            yield f"{_place(world, step, rank)} wrote no line, but wrote one for a later step"


def _half_skipped(valid: Iterable[Line]) -> Iterator[str]:
    """Report steps that some ranks skipped and others did not: all decide alike."""
    ways: dict[tuple[WorldId, int], dict[bool, int]] = defaultdict(dict)
    for line in valid:
        ways[line.world, line.step].setdefault(line.skipped, line.rank)
    for (world, step), ranks in sorted(ways.items()):
        if len(ranks) > 1:
            yield f"{_place(world, step, ranks[True])} was skipped, but not on rank {ranks[False]}"


def _unequal_sizes(lines: Iterable[Line]) -> Iterator[str]:
    """Report worlds whose lines have different sizes: a world has one size."""
    sizes: dict[WorldId, set[int]] = defaultdict(set)
    for line in lines:
        if line.size is not None:
            sizes[line.world].add(line.size)
    for world, found in sorted(sizes.items()):
        if len(found) > 1:
            sizes_found = " and ".join(map(str, sorted(found)))
            yield f"generation {world[1]} has lines with world sizes {sizes_found}"


def _place(world: WorldId, step: int, rank: int) -> str:
    return f"rank {rank} in step {step} of generation {world[1]}"


def _by_epoch(lines: Iterable[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        found[line.epoch].append(line)
    return found


def _seen_up_to(history: LedgerHistory) -> Collection[Sample]:
    """Return all numbers up to the largest seen: of samples, or of records in each shard."""
    seen = {sample for lines in history for line in lines for sample in line.ids}
    most: dict[int | None, int] = {}
    for sample in seen:
        shard, number = sample if isinstance(sample, tuple) else (None, sample)
        most[shard] = max(number, most.get(shard, number))
    if set(most) == {None}:
        return range(most[None] + 1)
    return {
        number if shard is None else (shard, number)
        for shard, last in most.items()
        for number in range(last + 1)
    }


# --- in words -------------------------------------------------------------------------------------


def _report(verdict: Verdict) -> Iterator[str]:
    yield (
        f"Valid lines: {verdict.valid}, from {_several(verdict.steps, 'step')} in "
        f"{_several(verdict.worlds, 'generation')}. Void lines, from undone steps: {verdict.void}."
    )
    for epoch in verdict.epochs:
        yield from _of_epoch(epoch)
    for sentence in verdict.contradictions:
        yield f"WRONG: {sentence}."
    if verdict.absent:
        yield f"No line from {_named(verdict.absent)}."
    if verdict.lost:
        yield f"{verdict.lost} lines could not be written."
    if verdict.unreadable:
        yield f"{verdict.unreadable} lines are unreadable: a kill may have cut them short."
    if not verdict.epochs:
        yield "Found no ledger lines."
    skipped = any(epoch.skipped for epoch in verdict.epochs)
    once = f"sample was used exactly once{', or is listed as skipped' if skipped else ''}."
    yield f"Every {once}" if verdict.ok else f"NOT every {once}"


def _of_epoch(epoch: EpochVerdict) -> Iterator[str]:
    more = f" and {epoch.unwitnessed} by ranks that wrote no line" if epoch.unwitnessed else ""
    if epoch.of is None:
        used = _several(epoch.used, "sample")
        yield f"epoch {epoch.epoch}: {used}{more}; not complete, so none count as missing."
    else:
        yield f"epoch {epoch.epoch}: {epoch.used} of {epoch.of} samples{more}."
    if epoch.skipped:
        yield f"  Skipped {len(epoch.skipped)}:"
        yield from _places(epoch.skipped, "in", "")
    if epoch.missing:
        yield f"  MISSING {len(epoch.missing) - epoch.unwitnessed}:"
        yield from _places(epoch.missing, "undone in", "in no line")
    if epoch.repeated:
        yield f"  REPEATED {len(epoch.repeated)}:"
        yield from _places(epoch.repeated, "used in", "")
    for sentence in epoch.contradictions:
        yield f"  WRONG: {sentence}."


def _places(found: Mapping[Sample, Sequence[Line]], where: str, nowhere: str) -> Iterator[str]:
    for sample in sorted(found, key=_sort_key)[:_MOST_NAMED]:
        lines = ", ".join(map(str, found[sample]))
        yield f"    {_name(sample)}: {f'{where} {lines}' if lines else nowhere}"
    if len(found) > _MOST_NAMED:
        yield f"    and {len(found) - _MOST_NAMED} more"


def _several(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _named(things: Sequence[Any]) -> str:
    rest = len(things) - _MOST_NAMED
    return ", ".join(map(_name, things[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")


def _name(thing: Any) -> str:
    return f"record {thing[1]} of shard {thing[0]}" if isinstance(thing, tuple) else str(thing)


def _sort_key(sample: Sample) -> tuple[int, int]:
    return sample if isinstance(sample, tuple) else (-1, sample)
