from __future__ import annotations

import doctest

import pytest

from torchelastic.transport import listener
from torchelastic.transport.listener import AdmissionLimits, Told


def test_doctests_hold():
    assert doctest.testmod(listener).failed == 0


@pytest.mark.parametrize(
    ("most", "of_a_source", "sources", "gone"),
    [
        (3, 3, "aaa", []),
        (3, 3, "aaaa", [0]),
        (9, 2, "aaaa", [0, 1]),
        (9, 2, "ababab", [0, 1]),
        (3, 2, "abcd", [0]),
        # The others of a full source go first; who came earlier from elsewhere stays.
        (4, 2, "baaaaa", [1, 2, 3]),
    ],
)
def test_limits_beyond_the_most_drop_the_oldest(most, of_a_source, sources, gone):
    waiting: AdmissionLimits[int] = AdmissionLimits(most, of_a_source)
    displaced = [waiting.enter(number, source) for number, source in enumerate(sources)]
    assert [peer for peer in displaced if peer is not None] == gone
    assert set(waiting) == set(range(len(sources))) - set(gone)
    assert len(waiting) == len(sources) - len(gone)


def test_limits_closing_connection_frees_its_slot():
    waiting: AdmissionLimits[str] = AdmissionLimits(2, 2)
    waiting.enter("one", "a")
    waiting.leave("one")
    waiting.leave("one")
    assert waiting.enter("two", "a") is None
    assert waiting.enter("three", "a") is None
    assert "one" not in waiting
    assert waiting.enter("four", "b") == "two"


def test_told_reports_each_thing_once_per_source():
    told = Told()
    assert told.first_time("a", "noise")
    assert not told.first_time("a", "noise")
    assert told.first_time("a", "silence")
    assert told.first_time("b", "noise")


def test_sources_not_seen_for_long_are_forgotten():
    told = Told(most=2)
    assert [told.first_time(source, "noise") for source in "abab"] == [True, True, False, False]
    assert told.first_time("c", "noise")
    assert [told.first_time(source, "noise") for source in "bca"] == [False, False, True]
