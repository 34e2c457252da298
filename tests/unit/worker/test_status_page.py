"""The status page: a reader gets a published state whole or not at all."""

import math
import os
import time
from array import array
from types import SimpleNamespace

import pytest

from torchelastic.worker import collective_log
from torchelastic.worker import status_page as status_pages
from torchelastic.worker.collective_log import (
    NO_ROW,
    ROWS,
    LoggedCollective,
    ShownCollectives,
    read,
)
from torchelastic.worker_counters import stalls


@pytest.fixture
def descriptor():
    made = status_pages.create()
    yield made
    os.close(made)


@pytest.fixture
def status_page(descriptor):
    made = status_pages.StatusPage(descriptor)
    yield made
    made.close()


def seen(descriptor):
    """The state that another process finds."""
    other = status_pages.StatusPage(descriptor)
    try:
        return [other.held(slot) for slot in range(status_pages.SLOTS)]
    finally:
        other.close()


def test_an_empty_page_holds_nothing_and_shows_no_generation(descriptor):
    assert seen(descriptor) == [None] * status_pages.SLOTS
    assert status_pages.read(descriptor).generation == -1
    assert status_pages.read_progress(descriptor) == (-1, -1, math.inf)


def test_status_page_holds_steady_fields_before_changing_ones(descriptor, status_page):
    assert status_page.publish(1, (2, 3), b"cde", b"ab")
    assert seen(descriptor)[1] == ((2, 3), b"abcde")
    assert status_page.publish(1, (2, 4), b"xy")
    assert seen(descriptor)[1] == ((2, 4), b"xy")


def test_status_page_holds_unchanged_bytes(descriptor, status_page):
    steady = [b"same" * 100, b"SAME" * 100]
    for number in range(8):
        same, other = steady[number // 2 % 2], b"%d" % (number // 4 * 1000)
        status_page.publish(0, (0, number), other, same)
        assert seen(descriptor)[0] == ((0, number), same + other)


def test_slots_keep_what_they_hold_when_one_grows(descriptor, status_page):
    for slot in range(status_pages.SLOTS):
        status_page.publish(slot, (0, slot), b"%d" % slot)
    status_page.entered(4, 8)
    shown = status_pages.read(descriptor)
    status_page.publish(2, (0, 9), b"x" * 50_000)
    assert status_pages.read(descriptor) == shown
    status_page.entered(4, 9)
    assert status_pages.read(descriptor).step == 9
    held = seen(descriptor)
    assert held[2] == ((0, 9), b"x" * 50_000)
    others = [slot for slot in range(status_pages.SLOTS) if slot != 2]
    assert [held[slot] for slot in others] == [((0, slot), b"%d" % slot) for slot in others]
    status_page.publish(1, (0, 10), b"new")
    assert seen(descriptor)[1] == ((0, 10), b"new")


def test_too_much_is_refused_and_what_was_there_stays(descriptor, status_page, monkeypatch):
    monkeypatch.setattr(status_pages, "SLOT_LIMIT", 10)
    status_page.publish(0, (0, 1), b"few")
    assert not status_page.publish(0, (0, 2), b"too many bytes")
    assert seen(descriptor)[0] == ((0, 1), b"few")


def test_a_torn_slot_is_none_until_the_next_worker_has_written_it(descriptor, status_page):
    status_page.publish(0, (0, 1), b"whole")
    status_page._memory[status_page._begin(0)] |= 1
    assert seen(descriptor)[0] is None
    successor = status_pages.StatusPage(descriptor)
    successor.publish(0, (1, 1), b"again")
    assert successor.held(0) == ((1, 1), b"again")
    successor.close()


# --- progress ------------------------------------------------------------------------------------


@pytest.fixture
def stalled(monkeypatch):
    seconds = array("d", [0.0] * len(stalls.COUNTED))
    monkeypatch.setattr(stalls, "seconds", seconds)
    return seconds


def test_a_step_is_shown_with_its_rank_and_time(descriptor, status_page, stalled):
    status_page.rank = 3
    before = time.monotonic()
    status_page.entered(1, 7)
    shown = status_pages.read(descriptor)
    assert (shown.generation, shown.rank, shown.step) == (1, 3, 7)
    assert before <= shown.at <= time.monotonic()
    assert status_pages.read_progress(descriptor) == (1, 7, shown.at)


def test_the_first_step_of_a_generation_stays_shown(descriptor, status_page, stalled):
    for generation, steps in ((0, (4, 5, 6)), (1, (6, 7))):
        for step in steps:
            status_page.entered(generation, step)
            assert status_pages.read_first_step(descriptor) == steps[0]
    successor = status_pages.StatusPage(descriptor)
    successor.entered(1, 7)
    assert status_pages.read_first_step(descriptor) == 7
    successor.close()


def test_a_step_without_hurry_still_shows_when_it_was_entered(descriptor, status_page, stalled):
    status_page.entered(0, 2)
    entered = status_pages.read(descriptor).at
    status_page.unhurried()
    assert status_pages.read_progress(descriptor) == (0, 2, math.inf)
    assert status_pages.read(descriptor).at == entered
    status_page.hurried()
    assert status_pages.read(descriptor).at == entered


def test_stalls_are_those_of_the_generation(descriptor, status_page, stalled):
    stalled[0] = 2.0  # before its first step
    status_page.entered(0, 0)
    assert status_pages.read(descriptor).stalled == (2.0, 0.0, 0.0, 0.0)
    stalled[0], stalled[2] = 2.5, 1.0
    status_page.entered(0, 1)
    assert status_pages.read(descriptor).stalled == (2.5, 0.0, 1.0, 0.0)
    stalled[3] = 4.0  # on the way into the next
    status_page.entered(1, 1)
    assert status_pages.read(descriptor).stalled == (0.0, 0.0, 0.0, 4.0)


def test_another_process_counts_its_own_stalls(descriptor, status_page, stalled):
    stalled[1] = 9.0
    status_page.entered(0, 5)
    stalled[1] = 0.5  # as a new process has it
    successor = status_pages.StatusPage(descriptor)
    successor.rank = 2
    successor.entered(1, 5)
    shown = status_pages.read(descriptor)
    assert (shown.rank, shown.stalled) == (2, (0.0, 0.5, 0.0, 0.0))
    successor.close()


@pytest.fixture
def hands(monkeypatch):
    """A clock that is moved by hand."""
    made = SimpleNamespace(at=1000.0, monotonic=lambda: made.at)
    monkeypatch.setattr(status_pages, "time", made)
    return made


def own(descriptor: int) -> float:
    return round(status_pages.read(descriptor).own, 9)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("data", 3.0), ("checkpoint", 1.0), ("snapshot", 1.0), ("peers", 1.0), ("aside", 1.0)],
)
def test_the_own_time_of_a_step_is_without_what_was_waited_for(
    descriptor, status_page, stalled, hands, kind, expected
):
    stalls.add(kind, 40.0)  # before the first step, it counts for none
    status_page.entered(0, 7)
    assert own(descriptor) == 0.0
    hands.at += 3.0
    stalls.add(kind, 2.0)
    status_page.entered(0, 8)
    assert own(descriptor) == expected


def test_the_own_time_is_that_of_the_generation(descriptor, status_page, stalled, hands):
    status_page.entered(0, 7)
    hands.at += 3.0
    status_page.entered(0, 8)
    status_page.unhurried()
    hands.at += 60.0
    status_page.entered(1, 8)
    assert own(descriptor) == 0.0
    hands.at += 0.5
    status_page.entered(1, 9)
    assert own(descriptor) == 0.5


def test_an_evaluation_is_nobodys_own_time_nor_is_a_wait_in_it_counted_twice(
    descriptor, status_page, stalled, hands
):
    status_page.entered(0, 7)
    hands.at += 1.0
    status_page.unhurried()
    hands.at += 30.0
    stalls.add("peers", 10.0)
    status_page.hurried()
    hands.at += 1.0
    status_page.entered(0, 8)
    assert own(descriptor) == 2.0


# --- collectives ----------------------------------------------------------------------------------


@pytest.fixture
def shown(descriptor):
    made = status_pages.StatusPage(descriptor)
    made.collectives.enter(4)
    yield made.collectives
    made.close()


def test_the_last_of_each_group_the_latest_first(descriptor, shown):
    world, other = shown.row_of("0"), shown.row_of("2")
    shown.launched(1, world, 1, b"all_gather")
    shown.launched(2, other, 1, b"broadcast")
    shown.launched(3, world, 2, b"all_reduce")
    launched = (LoggedCollective("all_reduce", 2, "0"), LoggedCollective("broadcast", 1, "2"))
    assert read(descriptor) == ShownCollectives(4, None, launched)


def test_collective_log_shows_collective_waited_for(descriptor, shown):
    row = shown.row_of("0")
    shown.launched(1, row, 1, b"all_reduce")
    shown.launched(2, row, 2, b"barrier")
    shown.waits(row, 1, b"all_reduce")
    assert read(descriptor).waits == LoggedCollective("all_reduce", 1, "0")
    shown.goes_on()
    assert read(descriptor).waits is None
    shown.waits(NO_ROW, 0, b"building a group")
    assert read(descriptor).waits == LoggedCollective("building a group", 0, "")


def test_a_world_begins_with_none(descriptor, shown):
    shown.launched(1, shown.row_of("0"), 1, b"all_reduce")
    shown.enter(5)
    assert read(descriptor) == ShownCollectives(5, None, ())
    rows = [shown.row_of(str(number)) for number in range(ROWS + 2)]
    assert rows == [*range(ROWS), NO_ROW, NO_ROW], "there is room for so many groups"


def test_collective_log_stays_within_its_part_of_page(descriptor, shown):
    before = os.pread(descriptor, collective_log.AT, 0)
    for number in range(ROWS):
        shown.launched(number + 1, shown.row_of("g" * 40), 2**60, b"n" * 40)
    shown.waits(0, 2**60, b"n" * 40)
    page = os.pread(descriptor, 4096, 0)
    assert page[: collective_log.AT] == before
    assert not any(page[collective_log.END :])


def test_collective_log_survives_growth_of_status_page(descriptor):
    made = status_pages.StatusPage(descriptor)
    made.collectives.enter(1)
    made.publish(0, (1, 1), b"x" * 100_000)
    made.collectives.launched(1, made.collectives.row_of("0"), 1, b"all_reduce")
    assert read(descriptor).launched == (LoggedCollective("all_reduce", 1, "0"),)
    made.close()


def test_no_workers_junk_is_an_error(descriptor):
    assert (read(descriptor).launched, read(descriptor).waits) == ((), None)
    descriptor = os.memfd_create("junk")
    for junk in (b"", b"\xff" * 4096):
        os.write(descriptor, junk)
        assert isinstance(read(descriptor), ShownCollectives)
    os.close(descriptor)
