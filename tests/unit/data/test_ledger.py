"""The ledger of samples, and whether a history used every sample exactly once."""

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.support import poll_for
from torchelastic.data import checker
from torchelastic.data import ledger as module
from torchelastic.data.checker import parse
from torchelastic.data.ledger import Ledger
from torchelastic.data.verdict import Line, check, split_valid


def line(generation, step, ids, *, rank=0, epoch=0, **more):
    return Line(generation=generation, step=step, rank=rank, epoch=epoch, ids=tuple(ids), **more)


def one_epoch(lines, samples=8, **more):
    return check(lines, expected=range(samples), epochs=1, **more)


UNDISTURBED = [
    line(0, 1, [3, 1]),
    line(0, 1, [0, 2], rank=1),
    line(0, 2, [7, 6]),
    line(0, 2, [5, 4], rank=1),
]


def test_an_undisturbed_epoch():
    verdict = one_epoch(UNDISTURBED)
    assert verdict.ok
    assert str(verdict).splitlines() == [
        "Valid lines: 4, from 2 steps in 1 generation. Void lines, from undone steps: 0.",
        "epoch 0: 8 of 8 samples.",
        "Every sample was used exactly once.",
    ]


@pytest.mark.parametrize(
    ("worlds", "valid"),
    [
        pytest.param({0: [1, 2, 3]}, {0: [1, 2, 3]}, id="one generation"),
        pytest.param({0: [1, 2], 1: [3]}, {0: [1, 2], 1: [3]}, id="nothing lost"),
        pytest.param({0: [1, 2, 3], 1: [3, 4]}, {0: [1, 2], 1: [3, 4]}, id="one step back"),
        pytest.param({0: [1, 2, 3], 4: [2]}, {0: [1], 4: [2]}, id="what is beyond is void, too"),
        pytest.param({0: [1, 2, 3], 1: [3], 2: [2]}, {0: [1], 2: [2]}, id="back and further back"),
        pytest.param({0: [1], 1: [2, 3], 2: [1]}, {2: [1]}, id="from the beginning"),
        pytest.param({2: [3], 0: [1, 2, 3]}, {0: [1, 2], 2: [3]}, id="in any order"),
    ],
)
def test_later_generations_void_lines_from_where_they_begin(worlds, valid):
    lines = [line(g, step, []) for g, steps in worlds.items() for step in steps]
    found = {}
    for one in split_valid(lines).valid:
        found.setdefault(one.generation, []).append(one.step)
    assert found == valid


def test_a_later_start_voids_whatever_its_generations_are():
    history = split_valid([line(7, 1, []), line(7, 2, []), line(0, 2, [], start=1)])
    assert [(one.start, one.step) for one in history.valid] == [(0, 1), (1, 2)]


def test_samples_of_steps_that_were_taken_back_come_again():
    again = [line(1, 2, [7, 6, 5]), line(1, 3, [4])]
    verdict = one_epoch(UNDISTURBED + again)
    assert verdict.ok
    assert verdict.void == 2


def test_a_sample_that_was_taken_back_and_never_came_again_is_missing():
    verdict = one_epoch([*UNDISTURBED, line(1, 2, [7, 6, 5])])
    assert not verdict.ok
    assert list(verdict.epochs[0].missing) == [4]
    assert "    4: undone in step 2 of generation 0 (rank 1)" in str(verdict)
    assert str(verdict).endswith("NOT every sample was used exactly once.")


SKIPPED = [*UNDISTURBED[:2], *(replace(one, skipped=True) for one in UNDISTURBED[2:])]


def test_verdict_of_skipped_step_lists_its_samples():
    verdict = one_epoch(SKIPPED)
    assert verdict.ok
    assert sorted(verdict.epochs[0].skipped) == [4, 5, 6, 7]
    report = str(verdict).splitlines()
    assert report[1:4] == [
        "epoch 0: 4 of 8 samples.",
        "  Skipped 4:",
        "    4: in step 2 of generation 0 (rank 1)",
    ]
    assert report[-1] == "Every sample was used exactly once, or is listed as skipped."


def test_verdict_of_skipped_sample_that_comes_again_is_repeated():
    verdict = one_epoch([*SKIPPED, line(1, 3, [6])])
    assert list(verdict.epochs[0].repeated) == [6]
    assert str(verdict).endswith("NOT every sample was used exactly once, or is listed as skipped.")


def test_verdict_of_step_that_one_rank_did_not_skip_is_wrong():
    verdict = one_epoch([*SKIPPED[:3], UNDISTURBED[3]])
    assert verdict.contradictions == [
        "rank 0 in step 2 of generation 0 was skipped, but not on rank 1"
    ]


def test_a_sample_in_no_line_is_missing():
    verdict = one_epoch(UNDISTURBED, samples=9)
    assert list(verdict.epochs[0].missing) == [8]
    assert "  MISSING 1:\n    8: in no line" in str(verdict)


def test_a_sample_used_twice_is_repeated_and_named_with_its_places():
    verdict = one_epoch([*UNDISTURBED, line(1, 3, [6])])
    assert list(verdict.epochs[0].repeated) == [6]
    where = "    6: used in step 2 of generation 0 (rank 0), step 3 of generation 1 (rank 0)"
    assert where in str(verdict)


@pytest.mark.parametrize(
    ("lines", "options", "ok"),
    [
        pytest.param(
            [line(0, 1, [0, 1]), line(0, 2, [1, 0], epoch=1)],
            {"epochs": 2},
            True,
            id="the same sample in two epochs",
        ),
        pytest.param(UNDISTURBED, {"epochs": 2}, False, id="an epoch that never began"),
        pytest.param(
            [*UNDISTURBED[:3], line(0, 2, [5, 4, 4], rank=1)],
            {"expected": range(8), "epochs": 1},
            False,
            id="twice by one rank in one step",
        ),
        pytest.param(
            UNDISTURBED, {"expected": range(10), "epochs": 1, "dropped": 2}, True, id="dropped"
        ),
        pytest.param(
            UNDISTURBED, {"expected": range(11), "epochs": 1, "dropped": 2}, False, id="too many"
        ),
    ],
)
def test_verdict_of_each_history(lines, options, ok):
    assert check(lines, **options).ok is ok


def test_the_last_epoch_need_not_be_complete_unless_asked_for():
    lines = [line(0, 1, [0, 1, 2]), line(0, 2, [2], epoch=1)]
    assert check(lines).ok
    assert "epoch 1: 1 sample; not complete, so none count as missing." in str(check(lines))
    verdict = check(lines, epochs=2)
    assert list(verdict.epochs[1].missing) == [0, 1]


def test_a_sample_that_does_not_exist_is_wrong():
    verdict = one_epoch(UNDISTURBED, samples=7)
    assert verdict.epochs[0].contradictions == ["unknown samples: 7"]


def test_no_line_proves_nothing():
    verdict = check([])
    assert not verdict.ok
    assert "Found no ledger lines." in str(verdict)


def test_long_lists_are_cut_short():
    report = str(one_epoch(UNDISTURBED, samples=100))
    assert "MISSING 92:" in report
    assert "    and 72 more" in report


# --- spans ----------------------------------------------------------------------------------------

#: Rank 1 was killed in step 2, when its gradients were in; rank 0 committed, and went on alone.
KILLED = [
    line(0, 1, [3, 1], size=2, span=(0, 4)),
    line(0, 1, [0, 2], size=2, span=(0, 4), rank=1),
    line(0, 2, [7, 6], size=2, span=(4, 8)),
    line(1, 3, [9, 8], size=1, span=(8, 10)),
]


def test_the_others_speak_for_a_rank_that_was_killed_before_it_committed():
    verdict = one_epoch(KILLED, samples=10)
    assert verdict.ok
    assert verdict.epochs[0].unwitnessed == 2
    assert verdict.absent == ["rank 1 in step 2 of generation 0"]
    assert "epoch 0: 8 of 10 samples and 2 by ranks that wrote no line." in str(verdict)
    assert "No line from rank 1 in step 2 of generation 0." in str(verdict)


def test_verdict_reports_missing_samples():
    verdict = one_epoch(KILLED, samples=11)
    assert not verdict.ok
    assert "MISSING 1:" in str(verdict)


def test_more_unwitnessed_than_are_in_no_line_means_that_some_were_used_twice():
    verdict = one_epoch([*KILLED, line(1, 4, [5], size=1, span=(10, 11))], samples=10)
    assert "some were used twice" in verdict.epochs[0].contradictions[0]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [line(0, 1, [0, 1], span=(0, 2)), line(0, 2, [2], span=(3, 4))],
            "no step used positions 2 to 3 of the order, before step 2 of generation 0 (rank 0)",
        ),
        (
            [line(0, 1, [0, 1], span=(0, 2)), line(0, 2, [2], span=(1, 2))],
            "step 2 of generation 0 (rank 0) used positions 1 to 2 of the order a second time",
        ),
        (
            [line(0, 1, [0, 1, 2], span=(0, 2))],
            "step 1 of generation 0 (rank 0) covers 2 positions, but its ranks used 3 samples",
        ),
    ],
)
def test_spans_that_do_not_follow_on_each_other_are_wrong(lines, told):
    verdict = one_epoch(lines, samples=3)
    assert told in verdict.epochs[0].contradictions
    assert f"  WRONG: {told}." in str(verdict)


def test_a_rank_that_was_alive_later_has_no_excuse_unless_lines_are_lost():
    lines = [
        line(0, 1, [3, 1], size=2, span=(0, 4)),
        line(0, 2, [7, 6], size=2, span=(4, 8)),
        line(0, 2, [5, 4], size=2, span=(4, 8), rank=1),
    ]
    verdict = one_epoch(lines)
    told = "rank 1 in step 1 of generation 0 wrote no line, but wrote one for a later step"
    assert verdict.contradictions == [told]
    assert not verdict.ok
    assert f"WRONG: {told}." in str(verdict)
    assert one_epoch(lines, lost=1).ok


def test_a_world_has_one_size():
    verdict = one_epoch([line(0, 1, range(4), size=1, span=(0, 4)), line(0, 2, [], size=2)])
    assert verdict.contradictions == ["generation 0 has lines with world sizes 1 and 2"]


# --- streams --------------------------------------------------------------------------------------


def test_records_of_shards():
    lines = [line(0, 1, [(0, 0), (1, 0)]), line(0, 2, [(0, 1), (1, 1)])]
    assert check(lines, epochs=1).ok
    verdict = check([*lines, line(0, 3, [(1, 1), (1, 3)])], epochs=1)
    assert list(verdict.epochs[0].missing) == [(1, 2)]
    assert list(verdict.epochs[0].repeated) == [(1, 1)]
    assert "record 2 of shard 1: in no line" in str(verdict)


# --- the command ----------------------------------------------------------------------------------


def test_lines_are_read():
    text = b'{"generation":2,"step":41,"rank":0,"epoch":1,"ids":[1,[2,3]],"size":3,"span":[9,12]}\n'
    assert parse(text) == Line(
        generation=2, step=41, rank=0, epoch=1, ids=(1, (2, 3)), size=3, span=(9, 12)
    )
    assert parse(b'{"generation":2,"rank":0,"lost":7}') == 7


def test_parse_rejects_invalid_lines():
    begun = b'{"generation":2,"step":1,"rank":0,"epoch":0,"ids":'
    wrong = [b"7}", b"[[1]]}", b"[true]}", b'[],"span":[1,2,3]}', b""]
    texts = [b"\xff\xfe", b"[]", b"7", b"{}", *(begun + end for end in wrong)]
    texts.append(begun.replace(b"2", b'"2"') + b"[]}")
    assert isinstance(parse(begun + b"[]}"), Line)
    assert [text for text in texts if parse(text) is not None] == []


def write(directory, name, *lines):
    directory.mkdir(parents=True, exist_ok=True)
    texts = [one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines]
    (directory / name).write_text("".join(texts))


def fields(generation, step, ids, **more):
    return {"generation": generation, "step": step, "rank": 0, "epoch": 0, "ids": ids, **more}


def test_directories_are_read_in_the_order_of_the_starts(tmp_path):
    write(tmp_path / "a" / "node1", "g3-r0.jsonl", fields(3, 1, [0]), fields(3, 2, [1]), '{"gen')
    write(tmp_path / "b", "g0-r0.jsonl", fields(0, 2, [1]), "\n", fields(0, 3, [2]))
    write(tmp_path / "b", "other.jsonl", fields(0, 2, [7]))
    found = checker.read([tmp_path / "a", tmp_path / "b"])
    assert [(one.start, one.step) for one in found.lines] == [(0, 1), (0, 2), (1, 2), (1, 3)]
    assert (found.lost, found.unreadable) == (0, 1)
    assert check(found.lines, epochs=1).ok


def test_the_command_says_yes_or_no(tmp_path, capsys):
    lost = {"generation": 0, "rank": 0, "lost": 3}
    write(tmp_path, "g0-r0.jsonl", fields(0, 1, [0, 1]), lost, fields(0, 2, [2]))
    assert checker.main([str(tmp_path), "--samples", "3", "--epochs", "1"]) == 0
    assert "3 lines could not be written." in capsys.readouterr().out
    assert checker.main([str(tmp_path), "--samples", "4", "--epochs", "1"]) == 1
    assert checker.main([str(tmp_path), "--samples", "4", "--epochs", "1", "--dropped", "1"]) == 0
    write(tmp_path, "g0-r0.jsonl", fields(0, 1, [[0, 0], [1, 0]]))
    assert checker.main([str(tmp_path), "--shards", "1,1", "--epochs", "1"]) == 0
    assert checker.main([str(tmp_path), "--shards", "1,2", "--epochs", "1"]) == 1


def test_a_wrong_directory_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        checker.main(["/nowhere"])
    assert ended.value.code == 2
    assert "'/nowhere' is not a directory" in capsys.readouterr().err


def test_the_command_runs_without_torch(tmp_path):
    write(tmp_path, "g0-r0.jsonl", fields(0, 1, [0, 1]))
    code = (
        "import runpy, sys; sys.argv = ['checker', sys.argv[1], '--epochs', '1']\n"
        "try: runpy.run_module('torchelastic.data.checker', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("Every sample was used exactly once.\n")


# --- the ledger: lines in files, off the training path, and what when that fails ------------------


def read_lines(path):
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
    assert read_lines(ledger.directory / "g0-r2.jsonl") == [
        {"generation": 0, "step": 1, "rank": 2, "epoch": 0, "ids": [5, 3]},
        {"generation": 0, "step": 2, "rank": 2, "epoch": 0, "ids": [], "size": 3, "span": [8, 10]},
    ]
    assert [line["ids"] for line in read_lines(ledger.directory / "g1-r0.jsonl")] == [[[4, 7]]]
    assert sorted(os.listdir(ledger.directory)) == ["g0-r2.jsonl", "g1-r0.jsonl"]


def test_ledger_records_the_samples_of_a_step(tmp_path):
    handed = SimpleNamespace(rank=1, size=2, epoch=0, span=(0, 4), ids=(2, 3))
    with Ledger(tmp_path) as ledger:
        ledger.record(3, 1, [handed])
        ledger.record(3, 2, [handed], skipped=True)
    line, skipped = read_lines(tmp_path / "g3-r1.jsonl")
    assert line == {"generation": 3, "step": 1, **vars(handed), "ids": [2, 3], "span": [0, 4]}
    assert skipped == line | {"step": 2, "skipped": True}
    assert parse(json.dumps(skipped).encode()).skipped


def test_ids_may_come_as_anything_that_has_numbers_and_may_change_later(tmp_path):
    numbers = [5, 3]
    forms = [numbers, torch.tensor([5, 3]), numpy.array([5, 3]), list(numpy.array([5, 3]))]
    with Ledger(tmp_path) as ledger:
        for step, ids in enumerate([*forms, iter((5, 3))]):
            ledger.committed(0, step, 0, 0, ids)
        numbers.clear()
    assert [line["ids"] for line in read_lines(tmp_path / "g0-r0.jsonl")] == [[5, 3]] * 5
    assert ledger.lost == 0


def test_flushed_lines_are_in_the_file(tmp_path):
    with Ledger(tmp_path) as ledger:
        assert ledger.flush()
        ledger.committed(0, 1, 0, 0, [1])
        assert ledger.flush(timeout=30)
        assert len(read_lines(tmp_path / "g0-r0.jsonl")) == 1


def test_nothing_is_made_before_the_first_line(tmp_path):
    with Ledger(tmp_path / "ledger"):
        assert not threads()
    assert not (tmp_path / "ledger").exists()


def test_a_ledger_that_nobody_holds_any_more_writes_all_and_ends(tmp_path):
    Ledger(tmp_path).committed(0, 1, 0, 0, [1])
    assert len(read_lines(tmp_path / "g0-r0.jsonl")) == 1


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
    assert len(read_lines(tmp_path / "g1-r0.jsonl")) == 1


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
    found = read_lines(tmp_path / "g0-r0.jsonl")
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
