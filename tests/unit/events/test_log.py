import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.support import FakeClock
from torchelastic.events import log as events_log
from torchelastic.events import types as events
from torchelastic.events.log import EventLog, Record, read, read_files
from torchelastic.events.rotation import lasting, length, opened, rotate
from torchelastic.events.types import Note, Progress, WorldFormed


def open_log(path: Path, **changes) -> EventLog:
    return EventLog(path, job="job", node="8f2c", clock=FakeClock(12.5), **changes)


def texts(path: Path) -> list[str]:
    return [record.fields["text"] for record in read(path)]


def test_a_line_has_an_envelope_and_the_fields_of_its_event_for_all_who_hear_of_it(tmp_path):
    path, heard, lines = tmp_path / "events.jsonl", [], []
    log = open_log(path, sink=lines.append)
    log.listen(heard.append)
    event = WorldFormed(["a", "b"], 4, "a:1", "the job starts", 0, [])
    log.emit(event, generation=0)
    (record,) = read(path)  # at once
    assert (record.event, record.type) == (event, "world-formed")
    assert (record.job, record.node) == ("job", "8f2c")
    assert (record.mono, record.generation) == (heard[0].mono, heard[0].generation) == (12.5, 0)
    assert heard[0].event == event
    log.emit(Note("hello"))
    log.close()
    assert lines == path.read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first.pop("wall") > 1.7e9
    assert first == json.loads(
        '{"v": 1, "type": "world-formed", "job": "job", "node": "8f2c", "mono": 12.5, '
        '"generation": 0, "nodes": ["a", "b"], "size": 4, "store": "a:1", '
        '"reason": "the job starts", "restarts_used": 0, "spares": [], "count": 0, "held": {}, '
        '"replica": 0}'
    )
    assert second["generation"] is None


def test_junk_and_half_lines_are_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    log.emit(Note("one"))
    log.close()
    good = path.read_bytes()
    future = good.replace(b'"v":1', b'"v":2')
    strange = good.replace(b'"generation":null', b'"generation":"x"')
    junk = [b"\n", b"\xff\xfe\n", b"[]\n", b"3\n", b"null\n", b'{"v":1}\n', future, strange]
    path.write_bytes(b"".join(junk) + good + good[: len(good) // 2])
    assert texts(path) == ["one"]


def test_steps_can_be_left_out(tmp_path):
    log = open_log(tmp_path / "events.jsonl")
    log.emit(Note("one"))
    log.emit(Progress([0], [1], [2.0]), generation=0)
    log.close()
    assert [record.type for record in read(log.path)] == ["note", "progress"]
    assert [record.type for record in read(log.path, steps=False)] == ["note"]


def test_a_listener_that_fails_costs_nothing_but_itself(tmp_path, caplog):
    log, heard = open_log(tmp_path / "events.jsonl"), []

    def fails(record: Record) -> None:
        raise ValueError("my mistake")

    log.listen(fails)
    log.listen(heard.append)
    log.emit(Note("one"))
    log.emit(Note("two"))
    log.close()
    assert (texts(log.path), len(heard)) == (["one", "two"], 2)
    assert caplog.text.count("it gets no more events") == 1


LATER = {"v": 1, "type": "new", "job": "j", "node": "n", "wall": 1, "mono": 1, "generation": 4}


def test_an_event_that_cannot_be_written_costs_that_event(tmp_path, caplog):
    log = open_log(tmp_path / "events.jsonl")
    log.emit(Note(text=object()))  # a mistake of ours
    log.emit(Note(text="after it"))
    log.close()
    assert "Events are lost" in caplog.text
    assert texts(log.path) == ["after it", "events lost before this, not written: 1"]


def test_a_record_of_another_agent_is_written_as_it_came_with_the_time_it_was_heard(tmp_path):
    log = open_log(tmp_path / "job.jsonl")
    record = Record.parse(json.dumps(LATER | {"extra": 5}))
    assert (record.event, record.fields) == (None, {"extra": 5}), "of a later version"
    log.append(record.heard_at(7.25))
    log.close()
    assert json.loads(log.path.read_text()) == LATER | {"extra": 5, "heard": 7.25}
    (read_again,) = read(log.path)
    assert (read_again.time, read_again.mono) == (7.25, 1)


def test_a_time_that_is_none_is_junk():
    for field in ("wall", "mono", "heard"):
        line = json.dumps(LATER | {"heard": 2} | {field: "?"})
        for strange in ("Infinity", "NaN", '"x"', "1e999", "1" * 400):
            assert Record.parse(line.replace('"?"', strange)) is None, (field, strange)


def test_no_file_and_a_device_in_the_place_of_a_log_have_no_records(tmp_path):
    assert list(read(tmp_path / "none")) == []
    (tmp_path / "job.jsonl").symlink_to("/dev/full")  # reading it would never end
    assert list(read(tmp_path / "job.jsonl")) == []


def test_a_pipe_is_read_to_its_end(tmp_path):
    log = open_log(tmp_path / "events.jsonl")
    log.emit(Note("hello"))
    log.close()
    reading, writing = os.pipe()
    os.write(writing, log.path.read_bytes())
    os.close(writing)
    try:
        assert texts(Path(f"/dev/fd/{reading}")) == ["hello"]
    finally:
        os.close(reading)


def test_the_size_counts_from_what_is_there_already(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n" * 3000)
    log = open_log(path, max_bytes=2000)
    log.emit(Note("x"))
    log.close()
    assert not path.exists()


@pytest.mark.parametrize("path", ["/dev/full", "/nonexistent/events.jsonl"])
def test_a_disk_that_cannot_be_written_costs_events_not_the_job(path, caplog):
    log = open_log(Path(path))
    log.emit(Note("x"))
    log.emit(Note("y"))
    log.close()
    assert log.dropped == 2
    assert caplog.text.count("Events are lost") == 1


def test_a_line_cut_short_by_a_full_disk_spoils_no_other(tmp_path, file_size_limit):
    log = open_log(tmp_path / "events.jsonl")
    log.emit(Note("one"))
    file_size_limit(log.path.stat().st_size + 20)
    log.emit(Note("lost"))
    log.emit(Note("lost too"))
    file_size_limit(1 << 20)
    log.emit(Note("two"))
    log.close()
    noted = "events lost before this, not written: 2"
    assert texts(log.path) == ["one", "two", noted]
    assert log.dropped == 2


@pytest.mark.parametrize("away", ["removed", "renamed", "cut"])
def test_a_log_that_somebody_takes_away_is_begun_again(tmp_path, away):
    log = open_log(tmp_path / "events.jsonl")
    log.emit(Note("one"))
    if away == "removed":
        log.path.unlink()
    elif away == "renamed":
        log.path.rename(tmp_path / "elsewhere")
    else:
        os.truncate(log.path, 0)
    log.emit(Note("two"))
    log.close()
    assert texts(log.path) == ["two"]
    assert log.dropped == 0


def test_a_directory_that_comes_back_has_the_rest(tmp_path):
    log = open_log(tmp_path / "run" / "events.jsonl")
    log.path.parent.mkdir()
    log.emit(Note("one"))
    shutil.rmtree(log.path.parent)
    log.emit(Note("two"))
    log.path.parent.mkdir()
    log.emit(Note("three"))
    log.close()
    assert texts(log.path) == ["three", "events lost before this, not written: 1"]


def test_of_a_long_log_not_every_step_is_read_for_a_picture(tmp_path, monkeypatch):
    path = tmp_path / "job.jsonl"
    for node in range(4):
        log = EventLog(path, job="job", node=f"n{node}", clock=FakeClock(float(node)))
        log.emit(Note(str(node)))
        for step in range(60):
            log.emit(Progress([node], [step], [float(step)]), generation=0)
        log.close()
    size = path.stat().st_size
    monkeypatch.setattr(events_log, "_LATEST", 1000)
    monkeypatch.setattr(events_log, "READ_ALL_LIMIT", size // 7)
    found = read_files([path], thin=True)
    kept = [record for record in found if record.type == "progress"]
    assert len(found) - len(kept) == 4, "what is no progress is read in full"
    assert 8 < len(kept) < 120
    assert {record.node for record in kept} == {"n0", "n1", "n2", "n3"}
    last = max(record.event.steps[0] for record in kept if record.node == "n3")
    assert last == 59, "the latest is"
    assert len(read_files([path])) == 244
    monkeypatch.setattr(events_log, "READ_ALL_LIMIT", size + 1)
    assert len(read_files([path], thin=True)) == 244


# --- rotation -------------------------------------------------------------------------------------


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
    log = open_log(path, max_bytes=600)
    fill(log, upto=1)
    path.rename(tmp_path / "events.jsonl.1")
    fill(log, first=1, upto=50)
    assert (tmp_path / "events.jsonl.0").exists()
    assert texts(path) == [str(number) for number in range(50)]
    assert path.stat().st_size > 1200, "it grows on while the disk is busy"
    slow_disk.set()
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
    kept = texts(path)
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
    log = open_log(path, max_bytes=600)
    fill(log, upto=1)
    path.rename(tmp_path / "events.jsonl.0")
    for number in range(1, 9):
        log.emit(events.Note(str(number)))
        log._rotation.wait(60)
    log.close()
    assert texts(path) == [str(number) for number in range(9)]
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
