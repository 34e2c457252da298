"""A full log: bounded, and what matters is the last to go."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from torchelastic.clock import FakeClock
from torchelastic.events import types as events
from torchelastic.events.log import EventLog, read
from torchelastic.events.rotation import lasting, length, opened, rotate


def line(kind: str, number: int) -> bytes:
    return b'{"v":1,"type":"%b","number":%d}\n' % (kind.encode(), number)


NOTES = [line("note", number) for number in (1, 3, 4)]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2 * len(NOTES[0]), NOTES[:2]), (1000, NOTES), (0, [])],
)
def test_rotation_keeps_first_lasting_lines_that_fit(most, expected):
    passing = [line("progress", 2), line("checkpoint-stored", 2)]
    lines = [NOTES[0], *passing, *NOTES[1:], b"half a li"]
    assert list(lasting(lines, most)) == expected


def test_a_device_is_never_renamed():
    rotate(Path(os.devnull), 10)
    assert Path(os.devnull).is_char_device()


def test_an_agents_own_log_keeps_what_matters_too(tmp_path):
    clock = FakeClock()
    log = EventLog(tmp_path / "events.jsonl", job="j", node="n", clock=clock, max_bytes=6_000)
    log.emit(events.AgentStarted(1, "", ["train.py"], 1, 1, 1))
    for number in range(300):
        clock.advance(1.0)
        log.emit(events.Progress([0], [number], [clock.now()]), generation=0)
        log._rotation.wait(60)
    log.emit(events.JobEnded(0, "done"))
    log.close()
    records = list(read(tmp_path / "events.jsonl"))
    assert [record.type for record in records if record.type != "progress"] == [
        "agent-started",
        "job-ended",
    ]
    steps = [record.event.steps[0] for record in records if record.type == "progress"]
    assert steps == list(range(steps[0], 300)), "the latest, whole"
    assert steps[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 15_000
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]


# --- behind the back of who writes ---------------------------------------------------------------


def open_log(path: Path) -> EventLog:
    return EventLog(path, job="j", node="n", clock=FakeClock(), max_bytes=600)


def told(path: Path) -> list[str]:
    return [record.event.text for record in read(path)]


def fill(log: EventLog, *, upto: int, first: int = 0) -> None:
    for number in range(first, upto):
        log.emit(events.Note(str(number)))


@pytest.fixture
def slow_disk(monkeypatch):
    """One that copies nothing until it is let."""
    let, copy = threading.Event(), shutil.copyfileobj

    def copies(*given):
        assert let.wait(60)
        copy(*given)

    monkeypatch.setattr("shutil.copyfileobj", copies)
    yield let
    let.set()


def test_a_slow_disk_blocks_nothing_and_whoever_reads_meanwhile_finds_everything(
    tmp_path, slow_disk
):
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    fill(log, upto=1)
    path.rename(tmp_path / "events.jsonl.1")
    fill(log, first=1, upto=50)
    assert (tmp_path / "events.jsonl.0").exists()
    assert told(path) == [str(number) for number in range(50)]
    assert path.stat().st_size > 1200, "it grows on while the disk is busy"
    slow_disk.set()
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
    kept = told(path)
    assert (kept[0], kept[-1], len(set(kept))) == ("0", "49", len(kept))


def test_no_line_is_read_twice_whatever_moves(tmp_path):
    path, aside, older = (tmp_path / f"log{end}" for end in ("", ".0", ".1"))
    full = b"".join(line("note", number) for number in range(200))
    older.write_bytes(line("note", -1) + full)
    aside.write_bytes(full)  # not removed yet
    path.write_bytes(line("note", 200))
    with opened(path) as files:
        assert b"".join(file.read() for file in files) == older.read_bytes() + path.read_bytes()
    assert length(path) == older.stat().st_size + path.stat().st_size
    older.unlink()
    os.link(aside, tmp_path / "same")
    os.replace(tmp_path / "same", path)  # moved between two looks
    with opened(path) as files:
        assert b"".join(file.read() for file in files) == full


def test_rotation_interrupted_by_a_kill_is_finished_next_time(tmp_path):
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    fill(log, upto=1)
    path.rename(tmp_path / "events.jsonl.0")
    for number in range(1, 9):
        log.emit(events.Note(str(number)))
        log._rotation.wait(60)
    log.close()
    assert told(path) == [str(number) for number in range(9)]
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
