"""Results as Markdown: one table of what was wanted and what came out, one of the spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Protocol

from benchmarks.harness import scenarios
from benchmarks.harness.bars import Bar
from benchmarks.harness.footprint import Footprint
from benchmarks.harness.launchers import FAST, OURS, OURS_NO_ZYGOTE, OURS_PRELOAD, SAFE, TORCHRUN
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Scenario
from benchmarks.harness.summary import Summary, ratio_interval

WANTED_FACTOR = 10
WANTED_ADMITTED = 20
WANTED_RATIO = 1.05
WANTED_CPU_PERCENT = 1.0
WANTED_PSS = 80.0

NOT_MEASURED = "not measured"
HEAD = ("measure", "torchelastic run", "torchrun", "ratio", "wanted")
SPREAD_HEAD = (
    "measure",
    "launcher",
    "repetitions",
    "failed",
    "median",
    "quartiles",
    "min to max",
    "split jobs",
    "failed starts",
)
Row = Sequence[str]


class Contestant(Protocol):
    """Who is measured, and how it is set."""

    @property
    def name(self) -> str: ...

    @property
    def note(self) -> str: ...


def render(results: Results) -> str:
    """The whole report."""
    rows = [
        *(row for scenario in FAULTS for row in _fault(results, scenario)),
        *_admission(results),
        *_keep(results),
        *_imports(results),
        *_cold(results),
        *_idle(results),
    ]
    parts = [about(results), table(HEAD, rows), FOOTNOTE, *spread(results), *failures(results)]
    return "\n\n".join(parts) + "\n"


FAULTS = (scenarios.WORKER, scenarios.NODE, scenarios.GROW)
FOOTNOTE = (
    "Seconds are medians (min to max). torchrun stands with the better of its settings *safe* and "
    "*fast*; a setting that failed or split a job counts only if the other did too."
)


def table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def best_setting(results: Results, row: str) -> str | None:
    """The setting of torchrun that a row is measured against."""
    able = [name for name in (SAFE.name, FAST.name) if results.summary(row, name).times]
    sound = [
        name
        for name in able
        if all(each.seconds and not each.overlaps for each in results.repetitions(row, name))
    ]
    return min(sound or able, key=lambda name: results.summary(row, name).median, default=None)


def about(results: Results) -> str:
    facts = results.about
    changed = " with changes" if facts.get("changed") else ""
    minutes = f", {facts['minutes']:.0f} minutes" if "minutes" in facts else ""
    return (
        f"{facts.get('date')}, commit {facts.get('commit')}{changed}, torch {facts.get('torch')}, "
        f"Python {facts.get('python')}, {facts.get('cores')} cores ({facts.get('cpu')}){minutes}"
    )


def load(results: Results) -> str:
    before, after = (results.about.get(f"load_{when}", 0.0) for when in ("before", "after"))
    return f"Load before: {before:.1f}, after: {after:.1f}."


def seconds(summary: Summary, digits: int = 2) -> str:
    """`0.31 s (0.28 to 0.40)`, or how many failed."""
    if not summary.count:
        return NOT_MEASURED
    failed = f"{summary.failed} of {summary.count} failed"
    if not summary.times:
        return failed
    text = median_range(summary.times, digits, " s")
    return f"{text}, {failed}" if summary.failed else text


def median_range(values: Sequence[float], digits: int, unit: str = "") -> str:
    """`0.31 s (0.28 to 0.40)`: the median and the range."""
    median, low, high = (
        f"{each:.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{median}{unit} ({low} to {high})"


def verdict(wanted: str, met: bool | None) -> str:
    return f"{wanted}: {'met' if met else '**missed**'}" if met is not None else wanted


def judged(bar: Bar | None) -> str:
    return verdict(bar.wanted, bar.met) if bar else "reported"


def interval(pairs: Sequence[tuple[float, float]], digits: int = 3) -> str:
    """`1.02 (0.98 to 1.07)`: the mean ratio of pairs and its 95 % interval."""
    found = ratio_interval(pairs)
    mean, low, high = (f"{each:.{digits}f}" for each in (found.ratio, found.low, found.high))
    return f"{mean} ({low} to {high})"


def how_they_ran(results: Results, contestants: Iterable[Contestant], *more: str) -> str:
    """How each contestant ran that was measured, and `more` about all."""
    measured = {name for by in results.faults.values() for name in by}
    lines = [f"{each.name}: {each.note}." for each in contestants if each.name in measured]
    return "How each of them ran:\n\n" + "\n".join(f"- {line}" for line in (*lines, *more))


def _versus(results: Results, row: str, ours: str, title: str, factor: int | None) -> Row:
    """Ours beside torchrun's best setting."""
    summary = results.summary(row, ours)
    best = best_setting(results, row)
    theirs = results.summary(row, best) if best else Summary(())
    ratio = theirs.median / summary.median if theirs.times and summary.times else None
    met = None
    if factor and ratio is not None:
        met = ratio >= factor and not summary.failed
    return (
        title,
        seconds(summary),
        f"{seconds(theirs)} {best.removeprefix('torchrun ')}" if best else seconds(theirs),
        f"{ratio:.1f} times faster" if ratio is not None else "",
        verdict(f"at least {factor} times faster", met) if factor else "reported",
    )


def _fault(results: Results, scenario: Scenario) -> list[Row]:
    if scenario.name not in results.faults:
        return []
    return [_versus(results, scenario.name, OURS.name, scenario.title, WANTED_FACTOR)]


def _admission(results: Results) -> list[Row]:
    """Who was let in, and whether two worlds of one job ever trained at the same time."""
    by = results.faults.get(scenarios.GROW.name)
    if not by:
        return []
    ours = by.get(OURS.name, [])
    admitted = sum(each.seconds is not None for each in ours)
    met = admitted == len(ours)
    known = len(ours) >= WANTED_ADMITTED or not met  # a shorter run cannot meet it, only miss it
    splits = sum(bool(each.overlaps) for each in ours)
    others = [(name, many) for name, many in by.items() if name != OURS.name]
    return [
        (
            "a node joins: admitted",
            f"{admitted} of {len(ours)}",
            "; ".join(
                f"{_short(name)} {sum(each.seconds is not None for each in many)} of {len(many)}"
                for name, many in others
            ),
            "",
            verdict(f"{WANTED_ADMITTED} of {WANTED_ADMITTED}", met if known else None),
        ),
        (
            "a node joins: jobs in which two worlds trained at once",
            f"{splits} of {len(ours)}",
            "; ".join(
                f"{_short(name)} {sum(bool(each.overlaps) for each in many)} of {len(many)}"
                for name, many in others
            ),
            "",
            verdict("none", not splits if ours else None),
        ),
    ]


def _short(name: str) -> str:
    return name.removeprefix("torchrun ")


def _keep(results: Results) -> list[Row]:
    row = scenarios.KEEP
    if row.name not in results.faults:
        return []
    return [_versus(results, row.name, OURS.name, row.title, None)]


def _imports(results: Results) -> list[Row]:
    row = scenarios.IMPORTS
    return [
        _versus(results, row.name, launcher.name, row.title + addition, None)
        for launcher, addition in ((OURS, ""), (OURS_PRELOAD, ", `--preload`"))
        if row.name in results.faults
    ]


def _cold(results: Results) -> list[Row]:
    rows: list[Row] = []
    for name, pairs in results.cold.items():
        whole = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not whole:
            rows.append((f"cold start, {name}", "failed", "failed", "", ""))
            continue
        control = "A/A" in name
        failed = f", {len(pairs) - len(whole)} of {len(pairs)} pairs failed"
        met = ratio_interval(whole).high <= WANTED_RATIO and len(whole) == len(pairs)
        ours, theirs = (Summary(tuple(times)) for times in zip(*whole, strict=True))
        rows.append(
            (
                f"cold start, {name}: first step",
                "(torchrun) " * control + seconds(ours),
                seconds(theirs) + failed * (len(whole) < len(pairs)),
                interval(whole, digits=2),
                "reported" if control else verdict(f"95 % interval up to {WANTED_RATIO}", met),
            )
        )
    return rows


def _idle(results: Results) -> list[Row]:
    if not results.idle:
        return []
    ours, theirs, plain = (
        results.idle.get(launcher.name) for launcher in (OURS, TORCHRUN, OURS_NO_ZYGOTE)
    )
    cpu_met = ours.agent_cpu_percent < WANTED_CPU_PERCENT if ours else None
    pss_met = ours.agent_pss < WANTED_PSS if ours else None
    forked = f"{_megabytes(ours, 'worker_unique')} forked"
    return [
        (
            "idle agent: share of a core",
            f"{ours.agent_cpu_percent:.2f} %" if ours else NOT_MEASURED,
            f"{theirs.agent_cpu_percent:.2f} %" if theirs else NOT_MEASURED,
            "",
            verdict(f"under {WANTED_CPU_PERCENT:g} %", cpu_met),
        ),
        (
            "idle agent: PSS",
            _megabytes(ours, "agent_pss"),
            _megabytes(theirs, "agent_pss"),
            "",
            verdict(f"under {WANTED_PSS:g} MB", pss_met),
        ),
        (
            "zygote and its helpers: PSS",
            _megabytes(ours, "helpers_pss"),
            _megabytes(theirs, "helpers_pss"),
            "",
            "reported",
        ),
        (
            "memory of a worker that nobody shares",
            f"{forked}, {_megabytes(plain, 'worker_unique')} plain",
            _megabytes(theirs, "worker_unique"),
            "",
            "reported",
        ),
    ]


def _megabytes(found: Footprint | None, name: str) -> str:
    return f"{getattr(found, name):.0f} MB" if found else NOT_MEASURED


def spread(results: Results) -> list[str]:
    """The table of all repetitions, if there are any."""
    rows = [
        _spread_row(row, name, results)
        for row, launchers in results.faults.items()
        for name in launchers
    ]
    return [table(SPREAD_HEAD, rows)] if rows else []


def _spread_row(row: str, name: str, results: Results) -> Row:
    summary, repetitions = results.summary(row, name), results.repetitions(row, name)
    times = ("", "", "")
    if summary.times:
        low, high = summary.quartiles
        times = (
            f"{summary.median:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{min(summary.times):.3f} to {max(summary.times):.3f}",
        )
    return (
        row,
        name,
        str(summary.count),
        str(summary.failed),
        *times,
        str(sum(bool(each.overlaps) for each in repetitions)),
        str(sum(each.details.get("failed_starts", 0) for each in repetitions)),
    )


def failures(results: Results) -> list[str]:
    """The paragraph about what went wrong, if anything did."""
    lines = [
        f"- {row}, {name}, {number}: {each.note}"
        for row, launchers in results.faults.items()
        for name, repetitions in launchers.items()
        for number, each in enumerate(repetitions, 1)
        if each.note
    ]
    return ["What went wrong:\n\n" + "\n".join(lines)] if lines else []
