"""What a worker shows of its collectives, and its agent reads."""

import os

import pytest

from torchelastic.worker import collective_log, status_page
from torchelastic.worker.collective_log import (
    NO_ROW,
    ROWS,
    LoggedCollective,
    ShownCollectives,
    read,
)


@pytest.fixture
def memory():
    descriptor = status_page.create()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def shown(memory):
    made = status_page.StatusPage(memory)
    made.collectives.enter(4)
    yield made.collectives
    made.close()


def test_the_last_of_each_group_the_latest_first(memory, shown):
    world, other = shown.row_of("0"), shown.row_of("2")
    shown.launched(1, world, 1, b"all_gather")
    shown.launched(2, other, 1, b"broadcast")
    shown.launched(3, world, 2, b"all_reduce")
    launched = (LoggedCollective("all_reduce", 2, "0"), LoggedCollective("broadcast", 1, "2"))
    assert read(memory) == ShownCollectives(4, None, launched)


def test_collective_log_shows_collective_waited_for(memory, shown):
    row = shown.row_of("0")
    shown.launched(1, row, 1, b"all_reduce")
    shown.launched(2, row, 2, b"barrier")
    shown.waits(row, 1, b"all_reduce")
    assert read(memory).waits == LoggedCollective("all_reduce", 1, "0")
    shown.goes_on()
    assert read(memory).waits is None
    shown.waits(NO_ROW, 0, b"building a group")
    assert read(memory).waits == LoggedCollective("building a group", 0, "")


def test_a_world_begins_with_none(memory, shown):
    shown.launched(1, shown.row_of("0"), 1, b"all_reduce")
    shown.enter(5)
    assert read(memory) == ShownCollectives(5, None, ())
    rows = [shown.row_of(str(number)) for number in range(ROWS + 2)]
    assert rows == [*range(ROWS), NO_ROW, NO_ROW], "there is room for so many groups"


def test_collective_log_stays_within_its_part_of_page(memory, shown):
    before = os.pread(memory, collective_log.AT, 0)
    for number in range(ROWS):
        shown.launched(number + 1, shown.row_of("g" * 40), 2**60, b"n" * 40)
    shown.waits(0, 2**60, b"n" * 40)
    page = os.pread(memory, 4096, 0)
    assert page[: collective_log.AT] == before
    assert not any(page[collective_log.END :])


def test_collective_log_survives_growth_of_status_page(memory):
    made = status_page.StatusPage(memory)
    made.collectives.enter(1)
    made.publish(0, (1, 1), b"x" * 100_000)
    made.collectives.launched(1, made.collectives.row_of("0"), 1, b"all_reduce")
    assert read(memory).launched == (LoggedCollective("all_reduce", 1, "0"),)
    made.close()


def test_no_workers_junk_is_an_error(memory):
    assert (read(memory).launched, read(memory).waits) == ((), None)
    descriptor = os.memfd_create("junk")
    for junk in (b"", b"\xff" * 4096):
        os.write(descriptor, junk)
        assert isinstance(read(descriptor), ShownCollectives)
    os.close(descriptor)
