"""A bucket lets through what its rate allows, and no more."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.snapshot.node import stream
from torchelastic.snapshot.node.stream import BURST, Bucket


def test_doctests_hold():
    assert doctest.testmod(stream).failed == 0


def test_no_rate_is_no_limit():
    assert Bucket(0).take(10**12, 1.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=50))
def test_over_any_time_it_is_the_rate_and_what_was_saved_up(takes):
    bucket, now, taken, rate = Bucket(1000), 0.0, 0, 1000
    for size, pause in takes:
        now += pause
        now += bucket.take(size, now)
        taken += size
        assert taken <= rate * now + rate * BURST + 1


def test_time_that_passes_unused_is_not_saved_up_without_end():
    bucket = Bucket(1000)
    bucket.take(0, 0.0)
    assert bucket.take(1000, 100.0) == pytest.approx(1 - BURST)
