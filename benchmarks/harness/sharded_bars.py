"""What `sharded.py` is to reach, as pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.bars import Bar
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.steady import Cost
from benchmarks.harness.summary import Summary, ratio_interval, summarize

KILL_SECONDS = 0.100
BACK_FACTOR = 1.5
STAND_STILL_STEPS = 3
JOINT_FACTOR = 1.2
EXTRA_CPU_SHARE = 0.02


def kill_median(summary: Summary) -> Bar:
    """Times are beyond one ordinary step."""
    wanted = f"one step + {KILL_SECONDS:g} s"
    return Bar(wanted, _all_within(summary, summary.median) if summary.times else None)


def kill_worst(summary: Summary) -> Bar:
    wanted = f"one step + {KILL_SECONDS:g} s"
    return Bar(wanted, _all_within(summary, max(summary.times)) if summary.times else None)


def _all_within(summary: Summary, seconds: float) -> bool:
    return not summary.failed and seconds <= KILL_SECONDS


def back_ratios(repetitions: Sequence[Repetition], bandwidth: float) -> Summary:
    """How many times as long as the replacement's start and a plain copy of the bytes it took."""
    return summarize(
        [
            None if each.seconds is None else each.seconds / least_seconds(each, bandwidth)
            for each in repetitions
        ]
    )


def least_seconds(repetition: Repetition, bandwidth: float) -> float:
    """The replacement's start, and a copy of the bytes over a plain socket."""
    details = repetition.details
    return float(details["start"] + details["received"] / bandwidth)


def back(ratios: Summary) -> Bar:
    wanted = f"median at most {BACK_FACTOR:g} times"
    met = ratios.median <= BACK_FACTOR and not ratios.failed if ratios.times else None
    return Bar(wanted, met)


def stood_still(repetitions: Sequence[Repetition]) -> Bar:
    wanted = f"each at most {STAND_STILL_STEPS} steps"
    whole = [each.details["stood_still"] for each in repetitions if each.seconds is not None]
    return Bar(wanted, max(whole) <= STAND_STILL_STEPS if whole else None)


def collectives(pairs: Sequence[tuple[Cost, Cost]]) -> Bar:
    met = all(first.collectives == second.collectives + 1 for first, second in pairs)
    return Bar("exactly one more", met if pairs else None)


def within_ratio(pairs: Sequence[tuple[float, float]], most: float) -> Bar:
    """Met if all of the 95 % interval is within the limit, missed if all of it is beyond."""
    wanted = f"95 % interval up to {most:g}"
    if len(pairs) < 2:
        return Bar(wanted, None)
    interval = ratio_interval(pairs)
    if interval.low <= most < interval.high:
        return Bar(f"{wanted}: too noisy to say", None)
    return Bar(wanted, interval.high <= most)


def cpu_share(pairs: Sequence[tuple[Cost, Cost]]) -> Bar:
    return within_ratio([(one.cpu, two.cpu) for one, two in pairs], 1 + EXTRA_CPU_SHARE)


def joint(pairs: Sequence[tuple[float, float]]) -> Bar:
    return within_ratio(pairs, JOINT_FACTOR)
