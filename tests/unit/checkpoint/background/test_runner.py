"""The thread that writes: a program that ends waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading, time
from torchelastic.checkpoint import runner

def write():
    ended.wait()
    time.sleep(0.05)
    print("written", flush=True)

ended = threading.Event()
working = runner.Runner()
working.put(runner.Task(1, write))
import atexit
atexit.register(ended.set)  # is called first: the interpreter is at its end
{end}
"""


def run(end):
    command = [sys.executable, "-c", _PROGRAM.format(end=end)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_program_that_ends_waits_for_what_is_being_written(end, code):
    ended = run(end)
    assert (ended.returncode, ended.stdout) == (code, "written\n")


def test_one_that_fails_waits_a_limited_time():
    ended = run("atexit.unregister(ended.set); runner.TIMEOUT_AFTER_AN_ERROR = 0.1; 1 / 0")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "ZeroDivisionError" in ended.stderr
