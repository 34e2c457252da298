"""The results of `sharded.py` as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.harness import bars, sharded_bars
from benchmarks.harness.bars import Bar
from benchmarks.harness.report import (
    Row,
    about,
    failures,
    how_they_ran,
    interval,
    judged,
    load,
    seconds,
    spread,
    table,
)
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.sharded_contestants import COMPUTE, OURS_SHARDED, PEERS
from benchmarks.harness.sharded_phases import PHASES
from benchmarks.harness.sharded_rows import CONTROL, COST, SINGLE, ShardedResults
from benchmarks.harness.steady import Cost
from benchmarks.harness.summary import Summary, summarize

HEAD = ("measure", "torchelastic.train", "the other", "ratio", "wanted")
FOOTNOTE = (
    "2 x 2: two replicas of two workers. A kill costs the time until all ranks of a new world have "
    "committed a step, minus one median step. Seconds are medians (min to max), ratios of pairs "
    "means with their 95 % interval."
)
SETTINGS = (
    f"all: gloo, {COMPUTE * 1000:.0f} ms of sleep in a step, spread over its layers.",
    "no failures: pairs of jobs under `torchelastic run`, one with `fully_shard` on a mesh "
    "of two dimensions, every other pair in reverse order.",
)


def render(results: ShardedResults) -> str:
    """The whole report."""
    rows = [*_kills(results), *_single(results), *_back(results), *_cost(results), *_joint(results)]
    parts = [_head(results), table(HEAD, rows), FOOTNOTE]
    parts.append(how_they_ran(results, (OURS_SHARDED, *PEERS), *SETTINGS))
    if shown := _phases(results):
        parts.append(table(("until the lost replica is back", "median (min to max)"), shown))
    parts += [*spread(results), *failures(results)]
    return "\n\n".join(parts) + "\n"


def _head(results: ShardedResults) -> str:
    copy = f"A plain copy over a socket: {results.bandwidth / 1e9:.2f} GB/s."
    return f"{about(results)}\n\n{copy} {load(results)}"


def _kills(results: ShardedResults) -> list[Row]:
    rows: list[Row] = []
    for name, title, is_judged in (("kill", "2 x 2", True), ("kill-4x2", "4 x 2", False)):
        repetitions = results.repetitions(name, OURS_SHARDED.name)
        ours = summarize([each.seconds for each in repetitions])
        if not ours.times:
            continue
        title = f"one rank of {title} killed → next committed step"
        step = f"a step: {_median(repetitions, 'step') * 1000:.0f} ms"
        median = sharded_bars.kill_median(ours) if is_judged else None
        worst = sharded_bars.kill_worst(ours) if is_judged else None
        rows.append(
            (f"{title}, median of {ours.count}", seconds(ours, 3), step, "", judged(median))
        )
        rows.append((f"{title}, worst", f"{max(ours.times):.3f} s", step, "", judged(worst)))
        began = summarize(
            [each.details["began"] for each in repetitions if each.seconds is not None]
        )
        rows.append((f"{title}: that step begins", seconds(began, 3), "", "", "reported"))
        for peer in PEERS:
            theirs = results.summary(name, peer.name)
            if theirs.count:
                again = _median(results.repetitions(name, peer.name), "redone")
                shown = f"{peer.name}: {seconds(theirs, 3)}, {again:g} steps again"
                times = bars.ratio(ours, theirs)
                ratio = f"{times:.0f} times faster" if times is not None else ""
                rows.append((title, seconds(ours, 3), shown, ratio, "reported"))
    return rows


def _single(results: ShardedResults) -> list[Row]:
    repetitions = results.repetitions("single", OURS_SHARDED.name)
    ours = summarize([each.seconds for each in repetitions])
    if not ours.times:
        return []
    title = f"one rank of 1 x 2 killed → next committed step, from memory, median of {ours.count}"
    again = max(each.details["redone"] for each in repetitions if each.seconds is not None)
    step = f"a step: {_median(repetitions, 'step') * 1000:.0f} ms"
    return [(title, seconds(ours, 3), step, f"at most {again:g} steps again", "reported")]


def _back(results: ShardedResults) -> list[Row]:
    repetitions = results.repetitions("back", OURS_SHARDED.name)
    whole = [each for each in repetitions if each.seconds is not None]
    if not whole:
        return []
    ratios = sharded_bars.back_ratios(repetitions, results.bandwidth)
    least = summarize([sharded_bars.least_seconds(each, results.bandwidth) for each in whole])
    megabytes = _median(whole, "received") / 1e6
    start = _median(whole, "start")
    still = summarize([each.details["stood_still"] for each in whole])
    began = summarize([each.details["began"] for each in whole])
    return [
        (
            f"the lost replica is back, {megabytes:.0f} MB",
            seconds(results.summary("back", OURS_SHARDED.name), 3),
            f"start {start:.3f} s + copy: {seconds(least, 3)}",
            f"{ratios.median:.2f} ({min(ratios.times):.2f} to {max(ratios.times):.2f})",
            judged(sharded_bars.back(ratios)),
        ),
        (
            "the others stand still for it, in steps",
            f"{still.median:.1f} (worst {max(still.times):.1f})",
            f"a step: {_median(whole, 'step') * 1000:.0f} ms",
            "",
            judged(sharded_bars.stood_still(repetitions)),
        ),
        ("the first step of all begins", seconds(began, 3), "", "", "reported"),
    ]


def _phases(results: ShardedResults) -> list[Row]:
    """How long each phase of `back` took."""
    repetitions = results.repetitions("back", OURS_SHARDED.name)
    found = [each.details["phases"] for each in repetitions if each.seconds is not None]
    by_phase = zip(*found, strict=True) if found else [()] * len(PHASES)
    shown = zip(PHASES, map(summarize, by_phase), strict=True)
    return [(title, seconds(summary, 3)) for title, summary in shown if summary.times]


def _cost(results: ShardedResults) -> list[Row]:
    rows: list[Row] = []
    if pairs := results.steady.get(COST.name, []):
        ours, native = (max(one.collectives for one in side) for side in zip(*pairs, strict=True))
        bar = sharded_bars.collectives(pairs)
        title = f"no failures, {COST.name}: collectives per step"
        rows.append((title, f"{ours:g}", f"native: {native:g}", "", judged(bar)))
        rows.append(_compared(COST.name, "cpu", pairs, sharded_bars.cpu_share(pairs)))
        rows.append(_compared(COST.name, "wall", pairs, None))
    for comparison in (SINGLE, CONTROL):
        if pairs := results.steady.get(comparison.name, []):
            rows.append(_compared(comparison.name, "cpu", pairs, None))
            rows.append(_compared(comparison.name, "wall", pairs, None))
    return rows


def _compared(title: str, kind: str, pairs: Sequence[tuple[Cost, Cost]], bar: Bar | None) -> Row:
    values = [(getattr(one, kind), getattr(two, kind)) for one, two in pairs]
    ours, native = (Summary(tuple(side)).median * 1000 for side in zip(*values, strict=True))
    word = "thread CPU time" if kind == "cpu" else "wall clock"
    return (
        f"no failures, {title}: {word} per step",
        f"{ours:.2f} ms",
        f"native: {native:.2f} ms",
        interval(values),
        judged(bar),
    )


def _joint(results: ShardedResults) -> list[Row]:
    if not results.joint:
        return []
    ours, bare = (Summary(side).median * 1e6 for side in zip(*results.joint, strict=True))
    return [
        (
            "the joint all-reduce of 4 bytes",
            f"{ours:.0f} us",
            f"plain gloo: {bare:.0f} us",
            interval(results.joint),
            judged(sharded_bars.joint(results.joint)),
        )
    ]


def _median(repetitions: Sequence[Repetition], name: str) -> float:
    found = [each.details[name] for each in repetitions if each.seconds is not None]
    return statistics.median(found) if found else 0.0
