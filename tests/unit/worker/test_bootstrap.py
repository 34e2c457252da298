"""Failures are told in full to the file and in short to the agent; calls travel as files."""

import json
import pickle
import subprocess
import sys

import pytest

from torchelastic.worker import bootstrap, channel, error_file


@pytest.fixture
def told(monkeypatch):
    messages = []
    monkeypatch.setattr(channel, "send", lambda message, timeout: messages.append(message))
    return messages


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")


def test_a_failure_is_reported_twice(told, tmp_path, monkeypatch):
    path = str(tmp_path / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    error = raised(RuntimeError("boom"))
    bootstrap.report(error, error.__traceback__)
    record = error_file.read(path)
    assert record.message == "RuntimeError: boom"
    assert "raise error" in record.traceback
    said = {"message": record.message, "traceback": record.traceback, "place": record.place}
    assert told == [{"type": "failure", **said}]
    assert error_file.heard(told[0]).place == "test_bootstrap.py:22 in raised"


@pytest.mark.parametrize("path", ["", "/no/such/directory/error.json"])
def test_without_a_place_for_the_file_the_agent_gets_the_error(told, monkeypatch, path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    bootstrap.report(ValueError("x"), None)
    bootstrap.report(Unprintable(), None)
    bootstrap.report(RuntimeError("\U0001f525" * 100_000), None)
    assert [one["message"] for one in told[:2]] == ["ValueError: x", "Unprintable: <unprintable>"]
    assert len(json.dumps(told[2])) < channel.LIMIT
    assert told[2]["traceback"].endswith("\U0001f525\n")


def test_a_call_is_made_and_its_result_kept(tmp_path, monkeypatch):
    from multiprocessing import spawn

    prepared = []
    monkeypatch.setattr(spawn, "prepare", prepared.append)  # it would change this process
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("RANK", "11")
    call = str(tmp_path / "call")
    bootstrap.write_call(call, divmod, (7, 2))
    bootstrap.run_call(call)
    with open(bootstrap.result_path(call, 3, 11), "rb") as file:
        assert pickle.load(file) == (3, 1)
    assert "authkey" not in prepared[0]
    assert "sys_path" in prepared[0]


WITHOUT_NUMPY = """
import sys
import warnings
from torchelastic.worker import bootstrap

class NoNumpy:
    def find_spec(name, path=None, target=None):
        if name == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name=name)

bootstrap.attach()
sys.meta_path.insert(0, NoNumpy)
import torch
warnings.warn("Failed to initialize NumPy: _ARRAY_API not found")
"""


def test_that_numpy_is_missing_is_no_warning():
    """Other problems with numpy are."""
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.splitlines() == [
        "<string>:14: UserWarning: Failed to initialize NumPy: _ARRAY_API not found"
    ]
