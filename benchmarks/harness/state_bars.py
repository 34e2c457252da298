"""What `state.py` is to reach, as pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.bars import Bar
from benchmarks.harness.summary import Summary, ratio_interval

BLOCKED_COPIES = 1.2
RESTORE_COPIES = 1.3
EVERY_STEP, EVERY_TEN = 0.05, 0.01
STEP_COPIES = 20
#: Of a core, to count as one that is free.
FREE_CORE = 0.8
SAVE_FACTOR = 10
PEER_SHARE = 0.60


def times(ours: Summary, basis: Summary) -> float | None:
    """How many times as long ours takes."""
    return ours.median / basis.median if ours.times and basis.times else None


def in_copies(ours: Summary, copy: Summary, most: float, name: str) -> Bar:
    found = times(ours, copy)
    return Bar(f"at most {most:g} times {name}", None if found is None else found <= most)


def every(pairs: Sequence[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    """Pairs of so many steps, by pairs of one with a snapshot and one without: what a snapshot
    costs lies within its step.

    >>> every([(1.5, 1.0)], 10)
    [(10.5, 10.0)]
    """
    return [(first + (steps - 1) * second, steps * second) for first, second in pairs]


def overhead(
    pairs: Sequence[tuple[float, float]], most: float, *, copies: float, free: float
) -> Bar:
    """Met if all of the 95 % interval is within the limit, missed if all of it is beyond.

    None in between, and if the promise does not hold for what was measured: steps were of too few
    copies, or no core was free.
    """
    wanted = f"95 % interval up to {most:.0%}"
    if len(pairs) < 2:
        return Bar(wanted, None)
    if copies < STEP_COPIES:
        return Bar(f"{wanted}; steps were shorter than {STEP_COPIES} copies", None)
    if free < FREE_CORE:
        return Bar(f"{wanted}; no core was free", None)
    interval = ratio_interval(pairs)
    if interval.low <= 1 + most < interval.high:
        return Bar(f"{wanted}: too noisy to say", None)
    return Bar(wanted, interval.high <= 1 + most)


def less_than_saving(ours: Summary, theirs: Summary) -> Bar:
    found = times(theirs, ours)
    met = None if found is None else found >= SAVE_FACTOR
    return Bar(f"at least {SAVE_FACTOR} times less", met)


def not_more(ours: Summary, theirs: Sequence[Summary]) -> Bar:
    """Held against the best of the others."""
    best = min((each.median for each in theirs if each.times), default=None)
    met = None if best is None or not ours.times else ours.median <= best
    return Bar("not more than the best of DCP's", met)


def bandwidth_share(ours: Summary, socket: Summary) -> Bar:
    """Of the same number of bytes."""
    found = times(socket, ours)
    met = None if found is None else found >= PEER_SHARE
    return Bar(f"at least {PEER_SHARE:.0%} of its bandwidth", met)
