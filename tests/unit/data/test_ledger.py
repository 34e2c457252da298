"""The ledger: lines in files, off the training path, and what when that fails."""

import json
import logging
import os
import threading
from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.support import poll_for
from torchelastic.data import ledger as module
from torchelastic.data.ledger import Ledger


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines() if text]


def threads():
    return [one for one in threading.enumerate() if one.name == "torchelastic-ledger"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    poll_for(lambda: not threads(), what="the end of all threads")


def test_a_line_for_each_step_in_a_file_for_each_generation_and_rank(tmp_path):
    with Ledger(tmp_path / "new" / "ledger") as ledger:
        ledger.committed(0, 1, 2, 0, [5, 3])
        ledger.committed(0, 2, 2, 0, [], size=3, span=(8, 10))
        ledger.committed(1, 3, 0, 0, [(4, 7)])
    assert lines(ledger.directory / "g0-r2.jsonl") == [
        {"generation": 0, "step": 1, "rank": 2, "epoch": 0, "ids": [5, 3]},
        {"generation": 0, "step": 2, "rank": 2, "epoch": 0, "ids": [], "size": 3, "span": [8, 10]},
    ]
    assert [line["ids"] for line in lines(ledger.directory / "g1-r0.jsonl")] == [[[4, 7]]]
    assert sorted(os.listdir(ledger.directory)) == ["g0-r2.jsonl", "g1-r0.jsonl"]


def test_ledger_records_the_samples_of_a_step(tmp_path):
    handed = SimpleNamespace(rank=1, size=2, epoch=0, span=(0, 4), ids=(2, 3))
    with Ledger(tmp_path) as ledger:
        ledger.record(3, 1, [handed])
    (line,) = lines(tmp_path / "g3-r1.jsonl")
    assert line == {"generation": 3, "step": 1, **vars(handed), "ids": [2, 3], "span": [0, 4]}


def test_ids_may_come_as_anything_that_has_numbers_and_may_change_later(tmp_path):
    numbers = [5, 3]
    forms = [numbers, torch.tensor([5, 3]), numpy.array([5, 3]), list(numpy.array([5, 3]))]
    with Ledger(tmp_path) as ledger:
        for step, ids in enumerate([*forms, iter((5, 3))]):
            ledger.committed(0, step, 0, 0, ids)
        numbers.clear()
    assert [line["ids"] for line in lines(tmp_path / "g0-r0.jsonl")] == [[5, 3]] * 5
    assert ledger.lost == 0


def test_flushed_lines_are_in_the_file(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert ledger.flush()
        ledger.committed(0, 1, 0, 0, [1])
        assert ledger.flush(timeout=30)
        assert len(lines(tmp_path / "g0-r0.jsonl")) == 1


def test_nothing_is_made_before_the_first_line(tmp_path):
    with Ledger(tmp_path / "ledger"):
        assert not threads()
    assert not (tmp_path / "ledger").exists()


def test_a_ledger_that_nobody_holds_any_more_writes_all_and_ends(tmp_path):
    Ledger(tmp_path).committed(0, 1, 0, 0, [1])
    assert len(lines(tmp_path / "g0-r0.jsonl")) == 1


def test_half_a_line_of_another_writer_is_not_glued_to_the_next(tmp_path, caplog):
    path = tmp_path / "g0-r0.jsonl"
    path.write_text('{"generation":0,"st')
    with Ledger(tmp_path) as ledger:
        ledger.committed(0, 1, 0, 0, [1])
    assert path.read_text().splitlines()[0] == '{"generation":0,"st'
    assert json.loads(path.read_text().splitlines()[1])["ids"] == [1]
    assert "g0-r0.jsonl already exists" in caplog.text


def told(caplog):
    return [record for record in caplog.records if "loses lines" in record.message]


def test_a_full_disk_is_reported_once_and_the_training_goes_on(tmp_path, caplog):
    (tmp_path / "g0-r0.jsonl").symlink_to("/dev/full")
    with Ledger(tmp_path) as ledger:
        for step in range(5):
            ledger.committed(0, step, 0, 0, [step])
        assert ledger.flush(timeout=30)
        ledger.committed(1, 5, 0, 0, [5])
    assert ledger.lost == 5
    assert len(told(caplog)) == 1
    assert "from step 0 on: [Errno 28]" in caplog.text
    assert len(lines(tmp_path / "g1-r0.jsonl")) == 1


def test_a_directory_that_cannot_be_made_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    with Ledger(tmp_path / "file" / "ledger") as ledger:
        ledger.committed(0, 1, 0, 0, [1])
        ledger.committed(0, 2, 0, 0, [2])
    assert (ledger.lost, len(told(caplog))) == (2, 1)


def test_the_file_says_how_many_lines_are_lost_when_it_can_be_written_again(tmp_path, caplog):
    with Ledger(tmp_path) as ledger:
        ledger.committed(0, 1, 0, 0, [1])
        ledger.committed(0, 2, 0, 0, [object()])  # cannot be written, either
        ledger.committed(0, 3, 0, 0, [3])
        ledger.committed(0, 4, 0, 0, [4])
    found = lines(tmp_path / "g0-r0.jsonl")
    assert [line.get("step") for line in found] == [1, None, 3, 4]
    assert found[1] == {"generation": 0, "rank": 0, "lost": 1}
    assert ledger.lost == len(told(caplog)) == 1


@pytest.fixture
def hangs(monkeypatch):
    """The disk hangs until this is set."""
    made = threading.Event()
    monkeypatch.setattr(module._File, "append", lambda *_: made.wait(60))
    return made


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path, caplog, monkeypatch, hangs):
    monkeypatch.setattr(module, "QUEUE_LIMIT", 3)
    with Ledger(tmp_path) as ledger:
        ledger.committed(0, 0, 0, 0, [])
        poll_for(lambda: ledger._writer._queue.empty(), what="the disk to hang")
        for step in range(1, 6):
            ledger.committed(0, step, 0, 0, [])
        assert ledger.lost == 2
        assert not ledger.flush(timeout=0.01)
        assert "the disk is too slow" in caplog.text
        hangs.set()


def test_a_process_ends_though_the_disk_hangs(tmp_path, caplog, monkeypatch, hangs):
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.01)
    ledger = Ledger(tmp_path)
    ledger.committed(0, 0, 0, 0, [])
    ledger.close()
    assert "its disk is hung" in caplog.text
    hangs.set()


def test_a_closed_ledger_loses_lines(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    ledger = Ledger(tmp_path)
    ledger.close()
    ledger.close()
    ledger.committed(0, 1, 0, 0, [1])
    assert ledger.lost == 1
    assert "the ledger is closed" in caplog.text


def test_a_process_that_cannot_have_another_thread_trains_on(tmp_path, caplog, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ledger = Ledger(tmp_path)
    ledger.committed(0, 1, 0, 0, [1])
    assert ledger.lost == 1
    assert "can't start new thread" in caplog.text
