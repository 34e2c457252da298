"""The gathered log: whole lines, bounded, and what matters is the last to go."""

import json
import os
from pathlib import Path

from torchelastic.agent.telemetry.collector import CollectedLog


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


def test_collected_log_drops_older_part_without_room_to_condense(tmp_path, monkeypatch, caplog):
    log = CollectedLog(tmp_path / "job.jsonl", max_bytes=10)
    log.write(line("note", 1))

    def no_room(*_):
        raise OSError("no space")

    monkeypatch.setattr("shutil.copyfileobj", no_room)
    log.write(line("note", 2))
    log.close()
    assert numbers(tmp_path / "job.jsonl.1") == [2]
    assert sorted(os.listdir(tmp_path)) == ["job.jsonl.1"]
