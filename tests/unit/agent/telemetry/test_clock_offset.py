"""When it was by the leader's clock, and what is told at a time."""

import math

import pytest

from torchelastic.agent.telemetry import clock_offset
from torchelastic.agent.telemetry.clock_offset import (
    Offset,
    batch_size,
    is_shipped,
    linger,
    next_batch,
)
from torchelastic.events.record import Record


@pytest.mark.parametrize(
    ("exchanges", "mono", "expected"),
    [
        # (sent by the agent's clock, heard by the leader's): the clocks differ by 100 everywhere.
        ([(5.0, 105.0)], 4.0, 104.0),
        ([(5.0, 105.25)], 4.0, 104.25),
        ([(5.0, 105.25), (6.0, 106.125), (7.0, 109.0)], 4.0, 104.125),
        ([(1000.0, 3.0)], 1001.0, 4.0),
    ],
    ids=["no delay", "an upper bound", "the least delay counts", "a leader booted later"],
)
def test_an_events_time_by_the_leaders_clock(exchanges, mono, expected):
    offset = Offset()
    for sent, came in exchanges:
        offset.note(sent, came)
    assert offset.at(mono) == expected


def test_a_better_estimate_does_not_turn_the_order_round():
    offset = Offset()
    offset.note(0.0, 11.0)
    first = offset.at(5.0)
    offset.note(6.0, 16.0)  # by 1 s less
    assert offset.at(5.5) == first == 16.0
    assert offset.at(7.0) == 17.0


@pytest.mark.parametrize(
    ("nodes", "seconds", "size"),
    [(1, 0.3, 65536), (64, 0.3, 65536), (128, 0.6, 32768), (1024, 4.8, 16384), (8192, 5.0, 16384)],
)
def test_the_more_nodes_the_rarer_and_smaller(nodes, seconds, size):
    assert (linger(nodes), batch_size(nodes)) == (pytest.approx(seconds), size)


def test_leader_alone_ships_shared_events_of_large_job():
    assert is_shipped("world-formed", 256, leads=False)
    assert not is_shipped("world-formed", 257, leads=False)
    assert is_shipped("world-formed", 257, leads=True)
    assert is_shipped("worker-failed", 10_000, leads=False)


def record(mono: float, kind: str = "note", text: str = "x") -> Record:
    return Record(
        type=kind, job="j", node="n", wall=0.0, mono=mono, generation=None, event=None,
        fields={"text": text},
    )  # fmt: skip


def told(records, nodes=1, *, leads=False):
    offset = Offset()
    offset.note(0.0, 100.0)
    upto, lines = next_batch(records, offset, nodes, leads=leads)
    return upto, [Record.parse(line) for line in lines.splitlines()]


def test_a_portion_holds_the_records_with_the_leaders_time():
    upto, records = told([record(1.0), record(2.0)])
    assert upto == 2.0
    assert [(one.mono, one.heard, one.fields) for one in records] == [
        (1.0, 101.0, {"text": "x"}),
        (2.0, 102.0, {"text": "x"}),
    ]


def test_a_portion_ends_before_it_is_too_large(monkeypatch):
    monkeypatch.setattr(clock_offset, "BATCH", 300)
    monkeypatch.setattr(clock_offset, "SMALLEST_BATCH", 300)
    upto, records = told([record(float(number)) for number in range(1, 9)])
    assert upto == len(records) == 2


def test_a_record_larger_than_a_portion_is_reported_alone_and_a_huge_one_not_at_all():
    upto, records = told([record(1.0, text="x" * clock_offset.BATCH), record(2.0)])
    assert (upto, len(records)) == (1.0, 1)
    upto, records = told([record(1.0, text="x" * clock_offset.LONGEST_LINE), record(2.0)])
    assert (upto, [one.mono for one in records]) == (2.0, [2.0])


def test_batch_covers_records_that_are_not_shipped():
    assert told([record(1.0, "waiting"), record(2.0, "waiting")], 1000) == (2.0, [])
    assert math.isfinite(told([record(1.0, "waiting")], 1000, leads=True)[1][0].heard)
