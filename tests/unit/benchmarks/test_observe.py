from __future__ import annotations

import math

import pytest

from benchmarks.harness.observe_report import beside, difference, render
from benchmarks.harness.observe_rows import QUIET, ObserveResults, calls_between, in_turn
from benchmarks.observe_parts import AGAIN, NOTHING, PLAIN, SCRIPT, TRAIN

PARTS = {name: [2000.0, 3000.0] for name in {*TRAIN, *SCRIPT, *PLAIN}} | {
    NOTHING: [50.0, 100.0],
    AGAIN: [50.0, 100.0],
}


def test_calls_are_counted_between_the_lines_of_a_part():
    lines = [
        "mmap(NULL, 4096) = 0x7f",
        r'write(2, "begin how far it is\n", 20) = 20',
        'write(1, "x", 1) = 1',
        "futex(0x7f) = 0",
        r'write(2, "end how far it is\n", 18) = 18',
        "munmap(0x7f) = 0",
        r'write(2, "begin nothing\n", 14) = 14',
        r'write(2, "end nothing\n", 12) = 12',
    ]
    assert calls_between(lines) == {"how far it is": 2, "nothing": 0}


def test_blocks_are_paired_with_their_neighbours():
    warming, rounds = [9.0] * 4, [3.0, 1.0, 5.0, 6.0, 4.0, 2.0, 4.0, 4.0]
    seen, control = in_turn([*warming, *rounds, 7.0])
    assert seen == [(4.0, 1.0), (4.0, 2.0)]
    assert control == [(5.0, 6.0), (4.0, 4.0)]


def test_a_difference_has_an_interval():
    mean, low, high = difference([(3.0, 1.0), (4.0, 1.0), (2.0, 1.0)])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert low == pytest.approx(2 * mean - high)
    assert difference([(3.0, 1.0)]) == (2.0, -math.inf, math.inf)


def test_an_empty_loop_is_taken_off_each_part():
    results = ObserveResults(parts=PARTS)
    assert beside(results, ["two metrics", "how far it is"]) == [3900.0, 5800.0]


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [(0.0, "and no call: met"), (0.5, "and no call: **missed**")],
)
def test_a_system_call_misses_the_mark_however_fast_it_is(calls, verdict):
    results = ObserveResults(parts=PARTS, calls=dict.fromkeys(PARTS, calls))
    assert render(results).count(verdict) == 3


def test_difference_within_noise_has_no_verdict():
    noisy = ObserveResults(pairs={QUIET: [(1.0, 0.5), (1.0, 2.0), (1.0, 1.0)]})
    assert "up to 1.05 |" in render(noisy)
    quiet = ObserveResults(pairs={QUIET: [(1.0, 1.0), (1.01, 1.0), (1.0, 1.0)]})
    assert "up to 1.05: met" in render(quiet)
    slow = ObserveResults(pairs={"train": [(5e-5, 1e-5), (6e-5, 1e-5), (5e-5, 1e-5)]})
    assert "interval up to 20 us: **missed**" in render(slow)
