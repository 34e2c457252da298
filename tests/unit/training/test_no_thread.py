"""No thread can be started: a worker goes on without it, or ends, but never stays half."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support import poll_for
from torchelastic.checkpoint.catalog import FenceClaim
from torchelastic.checkpoint.runner import Runner, Task
from torchelastic.errors import CheckpointError
from torchelastic.training.control import Control
from torchelastic.training.group import abortable_waits, parked
from torchelastic.training.group.abortable_waits import Waits


@pytest.fixture
def no_thread(monkeypatch):
    """Take the threads away; returns how to give them back."""
    start = threading.Thread.start

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(abortable_waits, "_idle", [])
    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_groups_are_dropped_when_there_is_a_thread_again(no_thread):
    poll_for(lambda: parked.parked() == 0, what="the end of earlier tests' groups")
    parked.park([object()], Waits(), silent=[], rank=0, aborted=True)
    assert parked.parked() == 1
    no_thread()
    parked.park([object()], Waits(), silent=[], rank=0, aborted=True)
    poll_for(lambda: parked.parked() == 0, what="both to be dropped")


def test_an_operation_that_was_not_begun_is_not_waited_for(no_thread):
    waits = Waits()
    with pytest.raises(RuntimeError, match="start new thread"):
        waits.call(lambda: None)
    assert waits.pending == 0


def test_train_closes_its_channel_if_it_cannot_listen(no_thread):
    """A node without an agent ends with it."""
    closed = []
    control = Control(SimpleNamespace(close=lambda: closed.append(True)))
    with pytest.raises(RuntimeError, match="start new thread"):
        control.start()
    assert closed == [True]


def test_a_checkpoint_fails_and_the_next_one_is_written(no_thread):
    runner, freed, written = Runner("there"), [], []
    runner.put(Task(1, lambda: written.append(1), lambda: freed.append(1)))
    assert not runner.is_busy
    runner.wait()
    with pytest.raises(CheckpointError, match=r"step 1 to there: .*start new thread"):
        runner.finish()
    no_thread()
    runner.put(Task(2, lambda: written.append(2), lambda: freed.append(2)))
    runner.finish()
    assert (written, freed) == ([2], [1, 2])


def test_the_first_checkpoint_takes_the_fence(no_thread, caplog):
    taken = []
    catalog = SimpleNamespace(
        take=lambda *_: taken.append(True),
        history=lambda _: None,
        storage=SimpleNamespace(place="there"),
    )
    claim = FenceClaim(catalog, None, 0)
    claim.begin()
    assert "Cannot write checkpoints to there yet" in caplog.text
    claim.ensure()
    assert taken == [True]


ENDLESS = """
import atexit, sys, time
from torchelastic.worker import bootstrap
bootstrap.EXIT_TIMEOUT = 1
bootstrap.attach()
atexit.register(time.sleep, 600)
raise ValueError("its error")
"""


def test_a_worker_that_does_not_end_after_its_error_is_ended():
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGALRM
    assert "ValueError: its error" in done.stderr
