"""When a checkpoint is due, as tables."""

from __future__ import annotations

import math

import pytest

from torchelastic.checkpoint.interval import (
    ASSUMED_TIME_BETWEEN_FAILURES,
    BACKGROUND_COST,
    SHORTEST_INTERVAL,
    CheckpointSchedule,
    Every,
    Measured,
    automatic,
    best_interval,
    between_failures,
    parse,
)
from torchelastic.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (None, None),
        (500, Every(steps=500)),
        ("90s", Every(seconds=90)),
        ("1.5 m", Every(seconds=90)),
        ("2h", Every(seconds=7200)),
        ("auto", Every(auto=True)),
    ],
)
def test_how_often_is_reported(text, every):
    assert parse(text) == every


def test_what_says_nothing_is_refused():
    for wrong in (0, -1, True, "", "0s", "soon", "5 d", "90", 1.5):
        with pytest.raises(ConfigError, match="use a number of steps"):
            parse(wrong)


@pytest.mark.parametrize(
    ("cost", "mean", "best"),
    [
        # Young's rule is sqrt(2 C M); Daly's adds terms that matter when C is not small beside M.
        (0.0, 3600.0, 0.0),
        (1.0, 3600.0, 84.19),
        (60.0, 86400.0, 3180.0),
        (60.0, 3600.0, 617.88),
        (600.0, 3600.0, 1697.71),
        (7200.0, 3600.0, 3600.0),
        (9999.0, 3600.0, 3600.0),
    ],
)
def test_the_best_interval(cost, mean, best):
    assert best_interval(cost, mean) == pytest.approx(best, rel=1e-3)


def lost(interval, cost, mean):
    """The share of time lost to checkpoints and to failures, of a job that runs for ever.

    Daly's model: a failure in an interval costs what was done in it, and it begins anew.
    """
    useful = interval / (mean * (math.exp((interval + cost) / mean) - 1))
    return 1 - useful


@pytest.mark.parametrize(("cost", "mean"), [(1, 3600), (60, 3600), (600, 3600), (5, 100000)])
def test_no_other_interval_loses_less(cost, mean):
    best = best_interval(cost, mean)
    least = lost(best, cost, mean)
    for factor in (0.5, 0.8, 1.25, 2):
        assert lost(best * factor, cost, mean) > least


def test_failures_are_counted_from_a_prior():
    assert between_failures(0, 0) == ASSUMED_TIME_BETWEEN_FAILURES
    assert between_failures(3600, 3) == (3600 + ASSUMED_TIME_BETWEEN_FAILURES) / 4
    assert between_failures(10**7, 100) == pytest.approx(10**5, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        (Measured(0.0, 0.0, 0, 0), SHORTEST_INTERVAL),
        (Measured(0.1, 0.0, 0, 0), best_interval(0.1, ASSUMED_TIME_BETWEEN_FAILURES)),
        # What is hidden costs something, too.
        (
            Measured(0.0, 5.0, 0, 0),
            best_interval(5 * BACKGROUND_COST, ASSUMED_TIME_BETWEEN_FAILURES),
        ),
        (
            Measured(0.1, 1.0, 0, 0),
            best_interval(0.1 + BACKGROUND_COST, ASSUMED_TIME_BETWEEN_FAILURES),
        ),
        # Storage that needs longer than pays sets the pace.
        (Measured(0.1, 5000.0, 0, 0), 5000.0),
        (
            Measured(0.1, 0.0, 3600, 9),
            best_interval(0.1, (3600 + ASSUMED_TIME_BETWEEN_FAILURES) / 10),
        ),
    ],
)
def test_the_automatic_interval(measured, seconds):
    assert automatic(measured) == seconds


def test_every_so_many_steps():
    pace = CheckpointSchedule.begin(Every(steps=5), 0, now=0.0)
    assert due_of(pace, range(1, 21)) == [5, 10, 15, 20]
    assert not pace.at(10).began(10, 1.0).is_due(2.0), "once for each step"
    assert pace.at(10).at(10).is_due(0.0), "asked twice"


@pytest.mark.parametrize(
    ("every", "asked", "due"),
    [
        (2, range(1, 10, 2), [3, 5, 7, 9]),
        (7, range(5, 40, 5), [10, 15, 25, 30, 35]),
        (5, [3, 4, 5, 3, 4, 5, 6], [5, 5]),  # rolled back
        (3, [100], []),
    ],
)
def test_not_every_step_need_be_asked_about(every, asked, due):
    assert due_of(CheckpointSchedule.begin(Every(steps=every), asked[0] - 1, now=0.0), asked) == due


def due_of(pace, steps):
    due = []
    for step in steps:
        pace = pace.at(step)
        due += [step] if pace.is_due(0.0) else []
    return due


def test_every_so_many_seconds():
    pace = CheckpointSchedule.begin(Every(seconds=30), 0, now=100.0)
    assert (pace.is_due(129.9), pace.is_due(130.0)) == (False, True)
    pace = pace.began(2, 131.0)
    assert (pace.is_due(160.9), pace.is_due(161.0)) == (False, True)
    assert pace.learned(Measured(2.0, 300.0, 10.0, 0)) == pace, "it is not automatic"


def test_an_automatic_pace_follows_what_is_measured():
    pace = CheckpointSchedule.begin(Every(auto=True), 0, now=0.0)
    assert pace.is_due(SHORTEST_INTERVAL)
    pace = pace.began(1, SHORTEST_INTERVAL).learned(Measured(2.0, 3.0, 10.0, 0))
    assert pace.seconds == pytest.approx(240, rel=0.02)
    assert not pace.is_due(SHORTEST_INTERVAL + 200)
    assert pace.is_due(SHORTEST_INTERVAL + 250)
