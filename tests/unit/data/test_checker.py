"""Ledgers as files, and the command that checks them."""

import json
import subprocess
import sys

import pytest

from torchelastic.data import checker
from torchelastic.data.checker import parse
from torchelastic.data.verdict import Line, check


def test_lines_are_read():
    text = b'{"generation":2,"step":41,"rank":0,"epoch":1,"ids":[1,[2,3]],"size":3,"span":[9,12]}\n'
    assert parse(text) == Line(
        generation=2, step=41, rank=0, epoch=1, ids=(1, (2, 3)), size=3, span=(9, 12)
    )
    assert parse(b'{"generation":2,"rank":0,"lost":7}') == 7


def test_what_is_no_line_is_not_taken_for_one():
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
