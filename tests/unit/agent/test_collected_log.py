"""Batches of events, with times by the leader's clock, and the log that collects them."""

import json
import math
import os
from pathlib import Path

import pytest

from torchelastic.agent.telemetry import clock_offset
from torchelastic.agent.telemetry.clock_offset import (
    Offset,
    batch_size,
    is_shipped,
    linger,
    next_batch,
)
from torchelastic.agent.telemetry.collector import CollectedLog
from torchelastic.events.record import Record

# --- When it was by the leader's clock, and what is shipped at a time -----------------------------


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


def batch_of(records, nodes=1, *, leads=False):
    offset = Offset()
    offset.note(0.0, 100.0)
    upto, lines = next_batch(records, offset, nodes, leads=leads)
    return upto, [Record.parse(line) for line in lines.splitlines()]


def test_a_portion_holds_the_records_with_the_leaders_time():
    upto, records = batch_of([record(1.0), record(2.0)])
    assert upto == 2.0
    assert [(one.mono, one.heard, one.fields) for one in records] == [
        (1.0, 101.0, {"text": "x"}),
        (2.0, 102.0, {"text": "x"}),
    ]


def test_a_portion_ends_before_it_is_too_large(monkeypatch):
    monkeypatch.setattr(clock_offset, "BATCH", 300)
    monkeypatch.setattr(clock_offset, "SMALLEST_BATCH", 300)
    upto, records = batch_of([record(float(number)) for number in range(1, 9)])
    assert upto == len(records) == 2


def test_a_record_larger_than_a_portion_is_reported_alone_and_a_huge_one_not_at_all():
    upto, records = batch_of([record(1.0, text="x" * clock_offset.BATCH), record(2.0)])
    assert (upto, len(records)) == (1.0, 1)
    upto, records = batch_of([record(1.0, text="x" * clock_offset.LONGEST_LINE), record(2.0)])
    assert (upto, [one.mono for one in records]) == (2.0, [2.0])


def test_batch_covers_records_that_are_not_shipped():
    assert batch_of([record(1.0, "waiting"), record(2.0, "waiting")], 1000) == (2.0, [])
    assert math.isfinite(batch_of([record(1.0, "waiting")], 1000, leads=True)[1][0].heard)


# --- The collected log: whole lines, bounded, and what matters is the last to go ------------------


def line(kind: str, number: int) -> bytes:
    return b'{"v":1,"type":"%b","number":%d}\n' % (kind.encode(), number)


def numbers(path) -> list[int]:
    return [json.loads(text)["number"] for text in path.read_text().splitlines()]


def test_a_full_log_becomes_the_older_part_and_what_matters_of_that_is_kept(tmp_path):
    log = CollectedLog(tmp_path / "job.jsonl", max_bytes=10 * len(line("progress", 10)))
    log.write(line("note", 10))
    for number in range(11, 40):
        log.write(line("progress", number))
    log.write(line("note", 40))
    log.close()
    older = tmp_path / "job.jsonl.1"
    kept = numbers(older)
    assert kept[0] == 10, "the one note of the part before"
    assert kept[1:] == list(range(kept[1], kept[-1] + 1)), "the part before this one, whole"
    assert numbers(tmp_path / "job.jsonl") == list(range(kept[-1] + 1, 41))
    assert older.stat().st_size < 25 * len(line("progress", 10))
    assert sorted(os.listdir(tmp_path)) == ["job.jsonl", "job.jsonl.1"]


def test_a_full_disk_costs_lines_and_is_reported_once(caplog):
    log = CollectedLog(Path("/dev/full"))
    log.write(line("note", 1))
    log.write(line("note", 2))
    log.close()
    assert log.dropped == 2
    assert len(caplog.records) == 1


def test_a_line_that_was_cut_short_is_not_glued_to_the_next(tmp_path, monkeypatch):
    log = CollectedLog(tmp_path / "job.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    log.write(line("note", 1))
    monkeypatch.setattr(os, "write", write)
    log.write(line("note", 2))
    log.close()
    assert (tmp_path / "job.jsonl").read_bytes() == line("note", 1)[:5] + b"\n" + line("note", 2)
    assert log.dropped == 1
