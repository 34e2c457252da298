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


@pytest.mark.parametrize(
    ("ours", "theirs", "met"),
    [
        ([0.1, 0.1], [3.0], True),
        ([0.1], [2.9], False),
        ([0.01, None], [3.0], False),  # fast, but it did not always come back
        ([0.1], [3.0, None], True),
        ([0.1], [None], None),  # never back: no number to compare with
        ([], [3.0], None),
    ],
)
def test_so_many_times_faster(ours, theirs, met):
    assert bars.faster(summarize(ours), summarize(theirs), 30).met is met


def test_a_recovery_within_the_step_that_was_due_is_not_infinitely_fast():
    assert bars.ratio(summarize([-0.01]), summarize([1.0])) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("times", "met"),
    [([0.09, 0.3, 0.05], True), ([0.11], False), ([0.01, None], False), ([], None)],
)
def test_a_median_below_a_limit(times, met):
    assert bars.median_below(summarize(times), 0.1).met is met


@pytest.mark.parametrize(
    ("times", "met"),
    [([1.15, 1.0], True), ([1.0, 1.2], False), ([1.0, None], False), ([None], False), ([], None)],
)
def test_the_worst_counts_where_something_fell_silent(times, met):
    assert bars.worst_below(summarize(times), 1.0, 0.15, "limit").met is met


@pytest.mark.parametrize(
    ("repetitions", "met"),
    [
        (recoveries((0.14, 0)), True),
        (recoveries((0.30, 0)), False),  # nothing had to move
        (recoveries((0.30, 1)), True),
        (recoveries((0.14, 0), (None, 0)), False),
        ([], None),
    ],
)
def test_a_large_model_is_allowed_the_copies_it_needs(repetitions, met):
    assert bars.large_kill(repetitions, copy=0.2).met is met


def test_a_failed_recovery_has_no_newcomers():
    found = bars.beyond_copy([Repetition(None), *recoveries((0.5, 2))], copy=0.2)
    assert found.failed == 1
    assert found.times == pytest.approx((0.1,))


@pytest.mark.parametrize(
    ("repetitions", "met"),
    [
        (joins((0.45, 0.05)), True),  # 3 steps and one and a half copies
        (joins((0.46, 0.05)), False),
        (joins((0.45, 0.05), (0.1, 0.05), (9.0, 0.05)), True),
        (joins((0.1, 0.05), (None, 0.05)), False),
        ([], None),
    ],
)
def test_a_join(repetitions, met):
    assert bars.join(repetitions, copy=0.2).met is met


@pytest.mark.parametrize(
    ("pairs", "met"),
    [([pair(140e-6, 100e-6)], True), ([pair(151e-6, 100e-6)], False), ([], None)],
)
def test_processor_time_of_a_small_step(pairs, met):
    assert bars.cpu_time(pairs).met is met


@pytest.mark.parametrize(("extra", "met"), [(0.004, True), (0.006, False)])
def test_processor_time_of_a_large_step_is_a_share_of_it(extra, met):
    assert bars.cpu_share([pair(0.1 + extra, 0.1)]).met is met


@pytest.mark.parametrize(("count", "met"), [(4.0, True), (5.0, False)])
def test_no_collective_more(count, met):
    assert bars.collectives([pair(0.1, 0.1, collectives=count)]).met is met


@pytest.mark.parametrize(
    ("kinds", "met"),
    [
        ({"futex": 3.0}, True),
        ({"futex": 3.0, "sendto": 2.0}, True),
        ({"futex": 3.0, "sendto": 2.5}, False),
        ({"futex": 3.0, "recvfrom": 1.0}, False),  # few, but one of them waits
    ],
)
def test_system_calls(kinds, met):
    assert bars.calls(Calls(3, kinds), Calls(3, {"futex": 3.0})).met is met


def test_without_strace_nothing_is_claimed():
    assert bars.calls(None, None).met is None
