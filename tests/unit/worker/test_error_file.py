"""`error.json`: what we write torch can read, what torch writes we can read, junk hurts nobody."""

import json

import pytest

from torchelastic.worker import error_file
from torchelastic.worker.error_file import ErrorRecord


def test_error_file_keeps_first_error(tmp_path):
    path = tmp_path / "error.json"
    assert error_file.write(str(path), "ValueError: ü", "Traceback …")
    assert not error_file.write(str(path), "second", "")
    record = error_file.read(str(path))
    assert (record.message, record.traceback) == ("ValueError: ü", "Traceback …")
    assert record.timestamp > 1_600_000_000
    assert [item.name for item in tmp_path.iterdir()] == ["error.json"]
    said = json.loads(path.read_text())  # in torch's format
    assert isinstance(said["message"]["extraInfo"].pop("timestamp"), str)
    extra = {"py_callstack": "Traceback …"}
    assert said == {"message": {"message": "ValueError: ü", "extraInfo": extra}}


def of(**extra):
    return {"message": {"message": "m", "extraInfo": extra}}


RECORDS = [
    ({"message": "text"}, ErrorRecord("text")),
    ({"message": "text", "timestamp": 7}, ErrorRecord("text", "", 7)),
    ({"message": "text", "timestamp": "8"}, ErrorRecord("text", "", 8)),
    ({"message": "text", "timestamp": None}, ErrorRecord("text")),
    ({"message": {"message": "m"}, "timestamp": 9}, ErrorRecord("m", "", 9)),
    ({"message": {"message": "m"}}, ErrorRecord("m")),
    ({"message": {"message": "m", "extraInfo": None}}, ErrorRecord("m")),
    (of(py_callstack="t", timestamp="7"), ErrorRecord("m", "t", 7)),
    (of(py_callstack=3, timestamp="soon"), ErrorRecord("m")),
    (of(timestamp=9), ErrorRecord("m", "", 9)),
    ({"message": {"message": 3}}, None),
    ({"message": None}, None),
    ({}, None),
    ([], None),
    (None, None),
]


def test_records_may_be_incomplete():
    for data, expected in RECORDS:
        assert error_file.parse(data) == expected, data


def test_junk_or_no_file_says_nothing(tmp_path):
    path = tmp_path / "error.json"
    for junk in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"message": {}}'):
        path.write_bytes(junk)
        assert error_file.read(str(path)) is None, junk[:20]
    assert error_file.read(str(tmp_path / "none")) is None
    assert error_file.read(str(tmp_path)) is None


HEAD = "Traceback (most recent call last):\n"
USER = '  File "/job/train.py", line 37, in step\n    loss.backward()\n'
TORCH = '  File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 9, in backward\n'
STANDARD = '  File "/usr/lib/python3.12/threading.py", line 5, in run\n'
OURS = f'  File "{error_file.__file__}", line 1, in write\n'
FROZEN = '  File "<frozen runpy>", line 88, in _run_code\n'


@pytest.mark.parametrize(
    ("traceback", "place"),
    [
        (f"{HEAD}{USER}{TORCH}RuntimeError: boom", "train.py:37 in step"),
        (f"{HEAD}{FROZEN}{STANDARD}{USER}{OURS}{STANDARD}E: x", "train.py:37 in step"),
        (f"{HEAD}{FROZEN}{TORCH}E: x", "_tensor.py:9 in backward"),
        (f"{HEAD}{USER}KeyError: 1\n\nDuring …\n\n{HEAD}{TORCH}E: x", "_tensor.py:9 in backward"),
        (f"{HEAD}{TORCH}KeyError: 1\n\nDuring …\n\n{HEAD}{USER}E: x", "train.py:37 in step"),
        ('  File "/job/train.py", line 3\n    x = (\nSyntaxError: no', "train.py:3"),
        (f"  + Exception Group {HEAD}  | {USER}  | E: x (1 sub-exception)", "train.py:37 in step"),
        ("a sentence", ""),
        ("", ""),
    ],
)
def test_the_place_of_an_error_is_the_innermost_frame_of_user_code(traceback, place):
    assert error_file.user_frame(traceback) == place
    assert error_file.parse(of(py_callstack=traceback)).place == place
