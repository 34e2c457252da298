"""The statistics of the benchmarks."""

from __future__ import annotations

import math

import pytest

from benchmarks.harness.summary import ratio_interval, student_t, summarize


def test_failed_repetitions_are_counted_and_have_no_time():
    found = summarize([3.0, None, 1.0, 2.0, None])
    assert (found.count, found.failed, found.median) == (5, 2, 2.0)
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]).quartiles == (2.0, 4.0)
    assert summarize([1.5]).quartiles == (1.5, 1.5)


def test_students_t_agrees_with_the_printed_tables():
    printed = {1: 12.706, 2: 4.303, 9: 2.262, 19: 2.093, 120: 1.980}
    found = {freedom: student_t(0.975, freedom) for freedom in printed}
    assert found == pytest.approx(printed, abs=1e-3)


def test_a_constant_ratio_has_no_width():
    found = ratio_interval([(1.0, 2.0), (3.0, 6.0), (5.0, 10.0)])
    assert (found.ratio, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    found = ratio_interval([(1.0, 2.0)])  # one pair says nothing about the spread
    assert (found.low, found.high) == (0.0, math.inf)


def test_the_interval_is_students_on_the_logarithms():
    logs = [0.0, 0.1, 0.2]
    found = ratio_interval([(math.exp(log), 1.0) for log in logs])
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(0.1)
    assert math.log(found.high) - 0.1 == pytest.approx(half, rel=1e-4)
    assert 0.1 - math.log(found.low) == pytest.approx(half, rel=1e-4)


def test_swapping_numerator_and_denominator_inverts_the_interval():
    pairs = [(2.0, 1.0), (2.5, 1.1), (1.9, 1.0)]
    one = ratio_interval(pairs)
    other = ratio_interval([(b, a) for a, b in pairs])
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert one.high == pytest.approx(1 / other.low)
