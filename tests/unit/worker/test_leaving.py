"""`torchelastic.leaving()`."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import torchelastic
from torchelastic.worker import leaving
from torchelastic.worker import leaving as module


def test_without_an_agent_nobody_leaves(monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    assert torchelastic.leaving() is None


def test_leave_notice_has_reason_and_seconds(tmp_path, monkeypatch):
    file = module.LeaveFile(tmp_path)
    monkeypatch.setenv(module.VARIABLE, str(file.path))
    assert torchelastic.leaving() is None
    file.announce("SIGTERM", time.monotonic() + 20)
    file.announce("SIGINT", time.monotonic() + 30)  # the first reason counts
    said = torchelastic.leaving()
    assert said.reason == "SIGTERM"
    assert 10 < said.seconds <= 20
    assert [one.name for one in tmp_path.iterdir()] == ["leaving.json"]


def test_the_earliest_deadline_counts(tmp_path, monkeypatch):
    """As on a spot machine in Kubernetes: a notice of two minutes, then the pod's grace period."""
    file = module.LeaveFile(tmp_path)
    monkeypatch.setenv(module.VARIABLE, str(file.path))
    file.announce("spot reclaim", time.monotonic() + 120)
    file.announce("SIGTERM", time.monotonic() + 30)
    said = torchelastic.leaving()
    assert said.reason == "spot reclaim"
    assert 20 < said.seconds <= 30


def test_the_next_agent_of_a_node_starts_without_the_file(tmp_path):
    module.LeaveFile(tmp_path).announce("SIGTERM", 0.0)
    assert not module.LeaveFile(tmp_path).path.exists()


# --- Signals that a scheduler sends to workers, too ----------------------------------------------


@pytest.fixture(autouse=True)
def default_handlers(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SHARED_SIGNALS", "SIGUSR1,SIGUSR2")
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_shared_signals_are_ignored_while_agent_decides():
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
