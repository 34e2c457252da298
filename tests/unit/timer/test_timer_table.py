"""A worker's timers in memory: what the agent reads is what the worker has set."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchelastic.timer import timer_table
from torchelastic.timer.timer_table import Timer, TimerTable, read


@pytest.fixture
def made():
    it = TimerTable()
    yield it
    it.close()


def test_a_timer_is_read_while_it_is_set(made):
    assert read(made.descriptor) == []
    row = made.set("load", 60.0, 1060.5)
    assert read(made.descriptor) == [Timer(row, 1060.5, 60.0, "load")]
    made.clear(row)
    assert read(made.descriptor) == []
    assert made.set("load", 60.0, 1061.5) == row
    assert read(made.descriptor) == [Timer(row, 1061.5, 60.0, "load")], "another timer"


def test_what_is_written_of_a_row_is_what_was_asked_for_last(made):
    for scope, after in (("a", 1.0), ("a", 2.0), ("long " * 9, 2.0), ("b", 2.0)):
        row = made.set(scope, after, 1.0)
        assert read(made.descriptor) == [Timer(row, 1.0, after, scope)]
        made.clear(row)


def test_whatever_a_scope_is_called_it_can_be_shown(made):
    for scope, shown in {
        "": "",
        "x" * 1000 + "/train.py#12": "/train.py#12",
        "ä" * 300: "ä" * 100,
        "two\nlines \x1b[31m": "two?lines ?[31m",
        "half \udce4 letter": "half \\udce4 letter",
    }.items():
        row = made.set(scope, 1.0, 1.0)
        (timer,) = read(made.descriptor)
        assert timer.scope.endswith(shown)
        assert timer.scope.isprintable()
        assert len(timer.scope.encode()) <= timer_table.ROW_BYTES
        made.clear(row)


def test_there_is_room_for_many_and_a_word_about_too_many(made):
    rows = [made.set(f"scope {number}", 1.0, 1.0) for number in range(timer_table.MOST)]
    assert len(set(rows)) == timer_table.MOST == len(read(made.descriptor))
    with pytest.raises(RuntimeError, match="1023 timers, the maximum: release some"):
        made.set("one more", 1.0, 1.0)
    made.clear(rows[5])
    assert made.set("one more", 1.0, 1.0) == rows[5]


def test_threads_do_not_get_in_each_others_way(made):
    def use(number):
        for _ in range(300):
            mine = made.set(f"thread {number}", float(number + 1), 1000.0 + number)
            found = {timer.row: timer for timer in read(made.descriptor)}
            seen.append(found[mine] == Timer(mine, 1000.0 + number, number + 1, f"thread {number}"))
            made.clear(mine)

    seen = []
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert seen == [True] * 1200
    assert read(made.descriptor) == []


def test_junk_is_no_error(made):
    for junk in (b"", b"\x01", b"\xff" * 4096, random.Random(7).randbytes(8192)):
        os.ftruncate(made.descriptor, 0)
        os.pwrite(made.descriptor, junk, 0)
        assert all(timer.scope.isprintable() for timer in read(made.descriptor))
        os.ftruncate(made.descriptor, timer_table.STACKS_AT)  # the mapping stays whole
