"""The harness of `benchmarks/rendezvous.py` over a few real agents."""

from __future__ import annotations

import pytest

from benchmarks.harness.crowd import EMBEDDED, measure_failures, measure_join


def test_agents_join():
    found = measure_join(EMBEDDED, 5, processes=2, limit=60)
    assert found.seconds is not None, found.output
    assert found.details["leases_lost"] == 0


@pytest.mark.slow
def test_agents_go_on_without_those_that_fail():
    """The harness gives its agents leases of half a minute, and one of them runs out."""
    found = list(measure_failures(EMBEDDED, 6, processes=2, repetitions=2, limit=60))
    assert [each.seconds is not None for each in found] == [True, True], found
    assert all(each.details["received"] > 0 for each in found)


def test_crowd_that_does_not_finish_has_no_time():
    found = measure_join(EMBEDDED, 4, processes=2, limit=0.0)
    assert found.seconds is None
    assert found.note == "not finished after 0 s"
