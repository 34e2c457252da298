"""Signals that a scheduler sends to workers, too."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from torchelastic.worker import leaving


@pytest.fixture(autouse=True)
def default_handlers(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SHARED_SIGNALS", "SIGUSR1,SIGUSR2")
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_they_do_nothing_while_the_agent_tells_what_to_do():
    with leaving.left_to_agent(lambda: True):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_of_the_script_stays():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    with leaving.left_to_agent(lambda: True):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [1]


def test_without_such_a_scheduler_and_in_other_threads_nothing_changes(monkeypatch):
    made = []
    thread = threading.Thread(target=lambda: made.append(leaving.ignore_while(lambda: True)))
    thread.start()
    thread.join()
    monkeypatch.setenv("TORCHELASTIC_SHARED_SIGNALS", "")
    assert [*made, leaving.ignore_while(lambda: True)] == [{}, {}]


def test_otherwise_they_end_the_process():
    program = """\
import os, signal
from torchelastic.worker import leaving
with leaving.left_to_agent(lambda: False):
    os.kill(os.getpid(), signal.SIGUSR1)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGUSR1
