"""The results of `in_process.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import bars, in_process_faults
from benchmarks.harness.bars import Bar
from benchmarks.harness.contestants import (
    NVRX,
    OURS_IN_PROCESS,
    PEER_CONTESTANTS,
    TORCHRUN_TUNED,
    Contestant,
)
from benchmarks.harness.in_process_results import InProcessResults
from benchmarks.harness.report import (
    NOT_MEASURED,
    Row,
    about,
    failures,
    how_they_ran,
    interval,
    judged,
    seconds,
    spread,
    table,
)
from benchmarks.harness.steady import BARE, RESIDENT, STEADY_WORKERS, Calls, Comparison, Cost
from benchmarks.harness.summary import Summary
from benchmarks.sizes import SIZES

HEAD = ("measure", "torchelastic", "the other", "ratio", "wanted")
TORCHRUN_FACTOR, TORCHFT_FACTOR, NVRX_FACTOR = 30, 10, 5
FOOTNOTE = (
    "Recovery is the time from the fault to the first step committed in a new world by all its "
    "ranks, minus one median step; a join costs the longest time without a committed step, minus "
    "one. Seconds are medians (min to max)."
)
SETTINGS = (
    f"no failures: {STEADY_WORKERS} workers, pairs of jobs under `torchelastic run`, one "
    "with a bare DDP loop, every other pair in reverse order; 95 % intervals of paired ratios."
)
SMALL = Comparison("10 k parameters", RESIDENT, BARE, "10k", steps=1500)
LARGE = Comparison("25 M parameters", RESIDENT, BARE, "25m", steps=15)
CONTROLS = tuple(
    Comparison(f"{each.name}, A/A control", BARE, BARE, each.size, each.steps)
    for each in (SMALL, LARGE)
)


def render(results: InProcessResults) -> str:
    """The whole report."""
    rows = [
        *_kills(results),
        *_large_kills(results),
        *_silence(results),
        *_joins(results),
        *_notices(results),
        *_steady(results),
        *_calls(results),
    ]
    ran = how_they_ran(results, (OURS_IN_PROCESS, *PEER_CONTESTANTS), SETTINGS)
    parts = [_head(results), table(HEAD, rows), FOOTNOTE, ran]
    parts += [*spread(results), *failures(results)]
    return "\n\n".join(parts) + "\n"


def factor(contestant: Contestant) -> int:
    """How many times faster ours is to be."""
    if contestant is TORCHRUN_TUNED:
        return TORCHRUN_FACTOR
    return NVRX_FACTOR if contestant is NVRX else TORCHFT_FACTOR


def _head(results: InProcessResults) -> str:
    gigabytes = results.bandwidth / 1e9
    return (
        f"{about(results)}\n\nA plain copy over a socket: {gigabytes:.2f} GB/s. Workers killed "
        f"because nothing else freed them: {results.last_resorts}."
    )


def _copy(results: InProcessResults, size: str) -> float:
    """Seconds in which one newcomer's state crosses a plain socket."""
    return SIZES[size].state_bytes / results.bandwidth if results.bandwidth else 0.0


def _ours(results: InProcessResults, fault: str) -> Summary:
    return results.summary(fault, OURS_IN_PROCESS.name)


def _line(title: str, ours: Summary, theirs: str, times: float | None, bar: Bar | None) -> Row:
    return (
        title,
        seconds(ours, 3),
        theirs,
        f"{times:.1f} times faster" if times is not None else "",
        judged(bar),
    )


def _kills(results: InProcessResults) -> list[Row]:
    fault = in_process_faults.KILL
    ours = _ours(results, fault.name)
    if fault.name not in results.faults:
        return []
    title = f"{fault.title}, 1 M parameters"
    rows = [_line(title, ours, "", None, bars.median_below(ours, bars.KILL_SECONDS))]
    for contestant in PEER_CONTESTANTS:
        theirs = results.summary(fault.name, contestant.name)
        if theirs.count:
            bar = bars.faster(ours, theirs, factor(contestant))
            shown = f"{contestant.name}: {seconds(theirs, 3)}"
            rows.append(_line(title, ours, shown, bars.ratio(ours, theirs), bar))
    return rows


def _large_kills(results: InProcessResults) -> list[Row]:
    fault = in_process_faults.KILL_LARGE
    if fault.name not in results.faults:
        return []
    ours = _ours(results, fault.name)
    repetitions = results.repetitions(fault.name, OURS_IN_PROCESS.name)
    bar = bars.large_kill(repetitions, _copy(results, fault.size))
    title = f"{fault.title}, 25 M parameters"
    return [_line(title, ours, "", None, bar), *_reported(results, fault.name, title)]


def _reported(results: InProcessResults, fault: str, title: str) -> list[Row]:
    """Peers at a row that has no bar against them."""
    ours = _ours(results, fault)
    rows = []
    for contestant in PEER_CONTESTANTS:
        theirs = results.summary(fault, contestant.name)
        if theirs.count:
            shown = f"{contestant.name}: {seconds(theirs, 3)}"
            rows.append(_line(title, ours, shown, bars.ratio(ours, theirs), None))
    return rows


def _silence(results: InProcessResults) -> list[Row]:
    limit, lease = in_process_faults.PROGRESS_LIMIT, in_process_faults.LEASE
    rows = []
    for name, title, basis, margin, word in (
        ("stop", f"worker SIGSTOP, --progress-timeout {limit:g}", limit, bars.STOP_MARGIN, "limit"),
        ("freeze", "all of a node SIGSTOP", lease, bars.SILENCE_MARGIN, "lease"),
        ("cut", "a node cut off without a reset", lease, bars.SILENCE_MARGIN, "lease"),
    ):
        if name in results.faults:
            ours = _ours(results, name)
            bar = bars.worst_below(ours, basis, margin, f"{word} {basis:g} s")
            rows.append(_line(title, ours, "", None, bar))
    return rows


def _joins(results: InProcessResults) -> list[Row]:
    rows: list[Row] = []
    for fault in (in_process_faults.JOIN, in_process_faults.JOIN_LARGE):
        if fault.name not in results.faults:
            continue
        ours = _ours(results, fault.name)
        title = f"{fault.title}, {fault.size[:-1]} M parameters: survivors stand still"
        repetitions = results.repetitions(fault.name, OURS_IN_PROCESS.name)
        bar = bars.join(repetitions, _copy(results, fault.size))
        rows.append(_line(title, ours, "", None, bar))
        theirs = results.summary(fault.name, TORCHRUN_TUNED.name)
        if theirs.count:
            shown = f"{TORCHRUN_TUNED.name}: {seconds(theirs, 3)}"
            against = bars.faster(ours, theirs, bars.JOIN_FACTOR)
            rows.append(_line(title, ours, shown, bars.ratio(ours, theirs), against))
    return rows


def _notices(results: InProcessResults) -> list[Row]:
    fault = in_process_faults.NOTICED
    if fault.name not in results.faults:
        return []
    repetitions = results.repetitions(fault.name, OURS_IN_PROCESS.name)
    title = f"{fault.title}: the other node stands still"
    return [_line(title, _ours(results, fault.name), "", None, bars.notice(repetitions))]


def _steady(results: InProcessResults) -> list[Row]:
    rows: list[Row] = []
    for comparison, cpu in ((SMALL, bars.cpu_time), (LARGE, bars.cpu_share)):
        pairs = results.steady.get(comparison.name, [])
        if pairs:
            rows += [_cpu(comparison, pairs, cpu(pairs)), _collectives(comparison, pairs)]
            rows.append(_wall(comparison.name, pairs))
    rows += [
        _wall(each.name, results.steady[each.name])
        for each in CONTROLS
        if results.steady.get(each.name)
    ]
    return rows


def _cpu(comparison: Comparison, pairs: Sequence[tuple[Cost, Cost]], bar: Bar) -> Row:
    extra = bars.extra_cpu(pairs)
    ours, bare = (Summary(tuple(each.cpu for each in side)) for side in zip(*pairs, strict=True))
    return (
        f"no failures, {comparison.name}: thread CPU per step",
        _microseconds(ours),
        f"bare DDP: {_microseconds(bare)}",
        f"{extra.median * 1e6:+.0f} us ({min(extra.times) * 1e6:+.0f} to "
        f"{max(extra.times) * 1e6:+.0f})",
        judged(bar),
    )


def _microseconds(summary: Summary) -> str:
    return f"{summary.median * 1e6:.0f} us"


def _collectives(comparison: Comparison, pairs: Sequence[tuple[Cost, Cost]]) -> Row:
    ours, bare = (max(each.collectives for each in side) for side in zip(*pairs, strict=True))
    bar = bars.collectives(pairs)
    title = f"no failures, {comparison.name}: collectives per step"
    return (title, f"{ours:g}", f"bare DDP: {bare:g}", "", judged(bar))


def _wall(name: str, pairs: Sequence[tuple[Cost, Cost]]) -> Row:
    ours, bare = (Summary(tuple(each.wall for each in side)) for side in zip(*pairs, strict=True))
    return (
        f"no failures, {name}: wall clock per step",
        f"{ours.median * 1000:.2f} ms",
        f"bare DDP: {bare.median * 1000:.2f} ms",
        interval([(first.wall, second.wall) for first, second in pairs]),
        "reported",
    )


def _calls(results: InProcessResults) -> list[Row]:
    ours, bare = results.calls.get(RESIDENT), results.calls.get(BARE)
    if not results.calls:
        return []
    bar = bars.calls(ours, bare)
    shown = ("", "") if not (ours and bare) else (_kinds(ours), _kinds(bare))
    more = f"{_total(ours) - _total(bare):+.1f}" if ours and bare else NOT_MEASURED
    title = "no failures, 10 k parameters: system calls of the training thread per step"
    return [(title, shown[0], f"bare DDP: {shown[1]}", more, judged(bar))]


def _total(calls: Calls) -> float:
    return sum(calls.kinds.values())


def _kinds(calls: Calls) -> str:
    often = {name: count for name, count in calls.kinds.items() if count >= 0.05}
    named = ", ".join(f"{name} {count:.1f}" for name, count in often.items())
    return f"{_total(calls):.1f} ({named})"
