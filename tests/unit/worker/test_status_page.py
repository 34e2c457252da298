"""The slate: what is published is held whole or not at all, by whoever looks."""

import math
import os
import time
from array import array
from types import SimpleNamespace

import pytest

from torchelastic.worker import status_page as slates
from torchelastic.worker_counters import stalls


@pytest.fixture
def descriptor():
    made = slates.create()
    yield made
    os.close(made)


@pytest.fixture
def slate(descriptor):
    made = slates.Slate(descriptor)
    yield made
    made.close()


def seen(descriptor):
    """What another process finds."""
    other = slates.Slate(descriptor)
    try:
        return [other.held(slot) for slot in range(slates.SLOTS)]
    finally:
        other.close()


def test_an_empty_slate_holds_nothing_and_shows_no_generation(descriptor):
    assert seen(descriptor) == [None] * slates.SLOTS
    assert slates.read(descriptor).generation == -1
    assert slates.read_progress(descriptor) == (-1, -1, math.inf)


def test_what_is_steady_is_held_before_what_changes(descriptor, slate):
    assert slate.publish(1, (2, 3), b"cde", b"ab")
    assert seen(descriptor)[1] == ((2, 3), b"abcde")
    assert slate.publish(1, (2, 4), b"xy")
    assert seen(descriptor)[1] == ((2, 4), b"xy")


def test_what_is_there_already_is_not_written_and_is_held(descriptor, slate):
    steady = [b"same" * 100, b"SAME" * 100]
    for number in range(8):
        same, other = steady[number // 2 % 2], b"%d" % (number // 4 * 1000)
        slate.publish(0, (0, number), other, same)
        assert seen(descriptor)[0] == ((0, number), same + other)


def test_slots_keep_what_they_hold_when_one_grows(descriptor, slate):
    for slot in range(slates.SLOTS):
        slate.publish(slot, (0, slot), b"%d" % slot)
    slate.entered(4, 8)
    shown = slates.read(descriptor)
    slate.publish(2, (0, 9), b"x" * 50_000)
    assert slates.read(descriptor) == shown
    slate.entered(4, 9)
    assert slates.read(descriptor).step == 9
    held = seen(descriptor)
    assert held[2] == ((0, 9), b"x" * 50_000)
    others = [slot for slot in range(slates.SLOTS) if slot != 2]
    assert [held[slot] for slot in others] == [((0, slot), b"%d" % slot) for slot in others]
    slate.publish(1, (0, 10), b"new")
    assert seen(descriptor)[1] == ((0, 10), b"new")


def test_too_much_is_refused_and_what_was_there_stays(descriptor, slate, monkeypatch):
    monkeypatch.setattr(slates, "SLOT_LIMIT", 10)
    slate.publish(0, (0, 1), b"few")
    assert not slate.publish(0, (0, 2), b"too many bytes")
    assert seen(descriptor)[0] == ((0, 1), b"few")


def test_a_torn_slot_is_none_until_the_next_worker_has_written_it(descriptor, slate):
    slate.publish(0, (0, 1), b"whole")
    slate._memory[slate._begin(0)] |= 1
    assert seen(descriptor)[0] is None
    successor = slates.Slate(descriptor)
    successor.publish(0, (1, 1), b"again")
    assert successor.held(0) == ((1, 1), b"again")
    successor.close()


# --- progress ------------------------------------------------------------------------------------


@pytest.fixture
def stalled(monkeypatch):
    seconds = array("d", [0.0] * len(stalls.COUNTED))
    monkeypatch.setattr(stalls, "seconds", seconds)
    return seconds


def test_a_step_is_shown_with_its_rank_and_time(descriptor, slate, stalled):
    slate.rank = 3
    before = time.monotonic()
    slate.entered(1, 7)
    shown = slates.read(descriptor)
    assert (shown.generation, shown.rank, shown.step) == (1, 3, 7)
    assert before <= shown.at <= time.monotonic()
    assert slates.read_progress(descriptor) == (1, 7, shown.at)


def test_the_first_step_of_a_generation_stays_shown(descriptor, slate, stalled):
    for generation, steps in ((0, (4, 5, 6)), (1, (6, 7))):
        for step in steps:
            slate.entered(generation, step)
            assert slates.read_first_step(descriptor) == steps[0]
    successor = slates.Slate(descriptor)
    successor.entered(1, 7)
    assert slates.read_first_step(descriptor) == 7
    successor.close()


def test_a_step_without_hurry_still_shows_when_it_was_entered(descriptor, slate, stalled):
    slate.entered(0, 2)
    entered = slates.read(descriptor).at
    slate.unhurried()
    assert slates.read_progress(descriptor) == (0, 2, math.inf)
    assert slates.read(descriptor).at == entered
    slate.hurried()
    assert slates.read(descriptor).at == entered


def test_stalls_are_those_of_the_generation(descriptor, slate, stalled):
    stalled[0] = 2.0  # before its first step
    slate.entered(0, 0)
    assert slates.read(descriptor).stalled == (2.0, 0.0, 0.0, 0.0)
    stalled[0], stalled[2] = 2.5, 1.0
    slate.entered(0, 1)
    assert slates.read(descriptor).stalled == (2.5, 0.0, 1.0, 0.0)
    stalled[3] = 4.0  # on the way into the next
    slate.entered(1, 1)
    assert slates.read(descriptor).stalled == (0.0, 0.0, 0.0, 4.0)


def test_another_process_counts_its_own_stalls(descriptor, slate, stalled):
    stalled[1] = 9.0
    slate.entered(0, 5)
    stalled[1] = 0.5  # as a new process has it
    successor = slates.Slate(descriptor)
    successor.rank = 2
    successor.entered(1, 5)
    shown = slates.read(descriptor)
    assert (shown.rank, shown.stalled) == (2, (0.0, 0.5, 0.0, 0.0))
    successor.close()


@pytest.fixture
def hands(monkeypatch):
    """A clock that is moved by hand."""
    made = SimpleNamespace(at=1000.0, monotonic=lambda: made.at)
    monkeypatch.setattr(slates, "time", made)
    return made


def own(descriptor: int) -> float:
    return round(slates.read(descriptor).own, 9)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("data", 3.0), ("checkpoint", 1.0), ("snapshot", 1.0), ("peers", 1.0), ("aside", 1.0)],
)
def test_the_own_time_of_a_step_is_without_what_was_waited_for(
    descriptor, slate, stalled, hands, kind, expected
):
    stalls.add(kind, 40.0)  # before the first step, it counts for none
    slate.entered(0, 7)
    assert own(descriptor) == 0.0
    hands.at += 3.0
    stalls.add(kind, 2.0)
    slate.entered(0, 8)
    assert own(descriptor) == expected


def test_the_own_time_is_that_of_the_generation(descriptor, slate, stalled, hands):
    slate.entered(0, 7)
    hands.at += 3.0
    slate.entered(0, 8)
    slate.unhurried()
    hands.at += 60.0
    slate.entered(1, 8)
    assert own(descriptor) == 0.0
    hands.at += 0.5
    slate.entered(1, 9)
    assert own(descriptor) == 0.5


def test_an_evaluation_is_nobodys_own_time_nor_is_a_wait_in_it_counted_twice(
    descriptor, slate, stalled, hands
):
    slate.entered(0, 7)
    hands.at += 1.0
    slate.unhurried()
    hands.at += 30.0
    stalls.add("peers", 10.0)
    slate.hurried()
    hands.at += 1.0
    slate.entered(0, 8)
    assert own(descriptor) == 2.0
