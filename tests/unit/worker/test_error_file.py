"""`error.json`: what we write torch can read, what torch writes we can read, junk hurts nobody."""

import json

import pytest

from torchelastic.worker import error_file
from torchelastic.worker.error_file import ErrorRecord


def test_what_is_written_can_be_read(tmp_path):
    path = str(tmp_path / "error.json")
    assert error_file.write(path, "ValueError: ü", "Traceback …")
    record = error_file.read(path)
    assert (record.message, record.traceback) == ("ValueError: ü", "Traceback …")
    assert record.timestamp > 1_600_000_000
    assert [item.name for item in tmp_path.iterdir()] == ["error.json"]


def test_the_first_to_tell_is_kept(tmp_path):
    path = str(tmp_path / "error.json")
    assert error_file.write(path, "first", "")
    assert not error_file.write(path, "second", "")
    assert error_file.read(path).message == "first"


def test_the_format_is_torchs(tmp_path):
    path = tmp_path / "error.json"
    error_file.write(str(path), "E: x", "T")
    said = json.loads(path.read_text())
    timestamp = said["message"]["extraInfo"].pop("timestamp")
    assert isinstance(timestamp, str)
    assert said == {"message": {"message": "E: x", "extraInfo": {"py_callstack": "T"}}}


RECORDS = [
    ({"message": "text"}, ErrorRecord("text")),
    ({"message": {"message": "m"}}, ErrorRecord("m")),
    ({"message": {"message": "m", "extraInfo": None}}, ErrorRecord("m")),
    (
        {"message": {"message": "m", "extraInfo": {"py_callstack": "t", "timestamp": "7"}}},
        ErrorRecord("m", "t", 7),
    ),
    (
        {"message": {"message": "m", "extraInfo": {"py_callstack": 3, "timestamp": "soon"}}},
        ErrorRecord("m"),
    ),
    (
        {"message": {"message": "m", "extraInfo": {"timestamp": 9}, "errorCode": 3}},
        ErrorRecord("m", "", 9),
    ),
    ({"message": {"message": 3}}, None),
    ({"message": None}, None),
    ({}, None),
    ([], None),
    (None, None),
]


@pytest.mark.parametrize(("data", "expected"), RECORDS)
def test_records_may_be_incomplete(data, expected):
    assert error_file.parse(data) == expected


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"message": {}}'])
def test_junk_says_nothing(tmp_path, junk):
    path = tmp_path / "error.json"
    path.write_bytes(junk)
    assert error_file.read(str(path)) is None


def test_no_file_says_nothing(tmp_path):
    assert error_file.read(str(tmp_path / "none")) is None
    assert error_file.read(str(tmp_path)) is None
