"""The results of `observe.py` as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness import observe_rows as rows
from benchmarks.harness.observe_rows import ObserveResults
from benchmarks.harness.report import Row, about, load, table, verdict
from benchmarks.harness.summary import ratio_interval, student_t
from benchmarks.observe_parts import AGAIN, NOTHING, PLAIN, SCRIPT, TRAIN

#: Microseconds of thread CPU time for a step, and how much longer a disturbed one may take.
MOST, MOST_RATIO = 20.0, 1.05

HEAD = ("measure", "result", "system calls in a step", "wanted")
FOOTNOTE = (
    "Microseconds of processor time of the training thread. Parts are medians (min to max) over "
    "repetitions of thousands of steps, less an empty loop. *In whole steps* is the mean "
    "difference between blocks of steps that are seen and blocks in which all of it is replaced "
    "by nothing, in one process, with its 95 % interval; A/A compares blocks that are seen. "
    "Disturbed steps are geometric means of ratios of median step times with their 95 % interval."
)


def render(results: ObserveResults) -> str:
    """The whole report."""
    lines = [*_parts(results), *_whole(results), *_agent(results), *_disturbed(results)]
    parts = [about(results), load(results), table(HEAD, lines), FOOTNOTE]
    if results.failed_rows:
        parts.append(f"What went wrong: no job of {', '.join(results.failed_rows)} ended well.")
    return "\n\n".join(parts) + "\n"


def microseconds(values: Sequence[float]) -> str:
    """Of nanoseconds: `1.42 us (1.38 to 2.00)`."""
    found = statistics.median(values), min(values), max(values)
    middle, low, high = (each / 1000 for each in found)
    return f"{middle:.2f} us ({low:.2f} to {high:.2f})"


def beside(results: ObserveResults, names: Sequence[str]) -> list[float]:
    """Nanoseconds of these parts together, by repetition, less those of an empty loop."""
    columns = [results.parts[name] for name in names]
    empty = results.parts[NOTHING]
    return [
        sum(column[at] for column in columns) - len(columns) * empty[at] for at in range(len(empty))
    ]


def _parts(results: ObserveResults) -> list[Row]:
    if not results.parts:
        return []
    single = [name for name in results.parts if name not in (NOTHING, AGAIN)]
    found: list[Row] = [_part(results, name, [name], None) for name in single]
    kinds = (("train", TRAIN), ("a script that commits", SCRIPT), ("a plain script", PLAIN))
    for mode, names in kinds:
        there = [name for name in names if name in results.parts]
        found.append(_part(results, f"all of it, in {mode}", there, MOST))
    return [*found, _part(results, "A/A: an empty loop", [AGAIN], None)]


def _part(results: ObserveResults, title: str, names: Sequence[str], most: float | None) -> Row:
    took = beside(results, names)
    calls = "not measured"
    none_made: bool | None = None
    if results.calls is not None:
        made = sum(results.calls[name] for name in names)
        calls, none_made = f"{made:.3f}", made == 0
    if most is None:
        return (title, microseconds(took), calls, "reported")
    met = statistics.median(took) <= 1000 * most and none_made is not False
    wanted = f"at most {most:g} us, and no call"
    return (title, microseconds(took), calls, verdict(wanted, met))


def difference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The mean difference of pairs and its 95 % interval, by Student's t."""
    apart = [first - second for first, second in pairs]
    mean = statistics.fmean(apart)
    if len(apart) < 2:
        return mean, -math.inf, math.inf
    half = student_t(0.975, len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
    return mean, mean - half, mean + half


def _whole(results: ObserveResults) -> list[Row]:
    found: list[Row] = []
    for name in (each for mode in rows.MODES for each in (mode, f"{mode}, A/A")):
        if name not in results.pairs:
            continue
        mean, low, high = (1e6 * each for each in difference(results.pairs[name]))
        met = high <= MOST if high <= MOST or low > MOST else None
        wanted = "reported" if "A/A" in name else verdict(f"interval up to {MOST:g} us", met)
        title = f"in whole steps of {name}"
        found.append((title, f"{mean:+.1f} us ({low:+.1f} to {high:+.1f})", "", wanted))
    return found


def _agent(results: ObserveResults) -> list[Row]:
    """A look comes once a second at most."""
    found: list[Row] = [
        (name, f"{microseconds(took)} of the agent", "", "reported")
        for name, took in results.looks.items()
    ]
    if results.agent_cpu_percent is not None:
        share = f"{results.agent_cpu_percent:.2f} % of a core"
        found.append(("the agent of two workers that train", share, "", "reported"))
    return found


def _disturbed(results: ObserveResults) -> list[Row]:
    found: list[Row] = []
    for name in rows.DISTURBED:
        if name not in results.pairs:
            continue
        interval = ratio_interval(results.pairs[name])
        met = interval.high <= MOST_RATIO
        known = met or interval.low > MOST_RATIO  # else it is not known
        wanted = verdict(f"95 % interval up to {MOST_RATIO}", met if known else None)
        shown = f"{interval.ratio:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        found.append((f"a step, disturbed by: {name}", shown, "", wanted))
    return found
