"""What `in_process.py` is to reach, and when it has."""

from __future__ import annotations

import pytest

from benchmarks.harness import bars
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.steady import Calls, Cost
from benchmarks.harness.summary import summarize


def recoveries(*each):
    """Repetitions of (seconds, newcomers in the first world)."""
    return [Repetition(seconds, details={"newcomers": count}) for seconds, count in each]


def joins(*each):
    """Repetitions of (seconds, an ordinary step)."""
    return [Repetition(seconds, details={"step": step}) for seconds, step in each]


def pair(cpu, bare_cpu, *, wall=1.0, collectives=4.0):
    return Cost(wall, cpu, collectives), Cost(wall, bare_cpu, 4.0)


def judged(bar, *rows):
    """Of rows of what a bar is given and whether it is to be met: those it judges otherwise."""
    return [row for row in rows if bar(*row[:-1]).met is not row[-1]]


def test_so_many_times_faster():
    assert not judged(
        lambda ours, theirs: bars.faster(summarize(ours), summarize(theirs), 30),
        ([0.1, 0.1], [3.0], True),
        ([0.1], [2.9], False),
        ([0.01, None], [3.0], False),  # fast, but it did not always come back
        ([0.1], [3.0, None], True),
        ([0.1], [None], None),  # never back: no number to compare with
        ([], [3.0], None),
    )
    # A recovery within the step that was due is not infinitely fast.
    assert bars.ratio(summarize([-0.01]), summarize([1.0])) == pytest.approx(1000)


def test_a_median_below_a_limit():
    assert not judged(
        lambda times: bars.median_below(summarize(times), 0.1),
        ([0.09, 0.3, 0.05], True),
        ([0.11], False),
        ([0.01, None], False),
        ([], None),
    )


def test_the_worst_counts_where_something_fell_silent():
    assert not judged(
        lambda times: bars.worst_below(summarize(times), 1.0, 0.15, "limit"),
        ([1.15, 1.0], True),
        ([1.0, 1.2], False),
        ([1.0, None], False),
        ([None], False),
        ([], None),
    )


def test_a_large_model_is_allowed_the_copies_it_needs():
    assert not judged(
        lambda repetitions: bars.large_kill(repetitions, copy=0.2),
        (recoveries((0.14, 0)), True),
        (recoveries((0.30, 0)), False),  # nothing had to move
        (recoveries((0.30, 1)), True),
        (recoveries((0.14, 0), (None, 0)), False),
        ([], None),
    )
    found = bars.beyond_copy([Repetition(None), *recoveries((0.5, 2))], copy=0.2)
    assert found.failed == 1
    assert found.times == pytest.approx((0.1,))


def test_a_join():
    assert not judged(
        lambda repetitions: bars.join(repetitions, copy=0.2),
        (joins((0.45, 0.05)), True),  # 3 steps and one and a half copies
        (joins((0.46, 0.05)), False),
        (joins((0.45, 0.05), (0.1, 0.05), (9.0, 0.05)), True),
        (joins((0.1, 0.05), (None, 0.05)), False),
        ([], None),
    )


def test_bars_show_step_cost():
    small, large = [pair(140e-6, 100e-6)], [pair(151e-6, 100e-6)]
    assert not judged(bars.cpu_time, (small, True), (large, False), ([], None))
    # Of a large step it is a share.
    assert not judged(bars.cpu_share, ([pair(0.104, 0.1)], True), ([pair(0.106, 0.1)], False))
    same, more = ([pair(0.1, 0.1, collectives=count)] for count in (4.0, 5.0))
    assert not judged(bars.collectives, (same, True), (more, False))
    assert not judged(
        lambda kinds: bars.calls(Calls(3, kinds), Calls(3, {"futex": 3.0})),
        ({"futex": 3.0}, True),
        ({"futex": 3.0, "sendto": 2.0}, True),
        ({"futex": 3.0, "sendto": 2.5}, False),
        ({"futex": 3.0, "recvfrom": 1.0}, False),  # few, but one of them waits
    )
    assert bars.calls(None, None).met is None  # without strace nothing is claimed
