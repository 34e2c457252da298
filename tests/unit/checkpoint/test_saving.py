"""Saving stops nobody, loses nothing silently, and carries the step."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support import poll_for
from tests.unit.checkpoint.conftest import Number, after
from torchelastic import checkpoint, faults
from torchelastic.checkpoint import Checkpoint, CheckpointManager, saving, set_checkpoint_manager
from torchelastic.errors import CheckpointError

EVERY_WRITE_FAILS = ";".join(
    f"raise@place=checkpoint.write,generation=any,n={n}" for n in range(1, 9)
)


class OfTheUser(CheckpointManager):
    """A manager of streams, as users of 0.1 have written theirs; a store does the work."""

    def __init__(self, store):
        self.store = store
        self.directory = store.directory

    def create_checkpoint(self):
        return self.store.create_checkpoint()

    def get_checkpoint(self, sequence_id):
        return self.store.get_checkpoint(sequence_id)

    def get_latest_checkpoint(self):
        return self.store.get_latest_checkpoint()

    def list_checkpoints(self):
        return self.store.list_checkpoints()


@pytest.fixture
def streams(manager):
    used = OfTheUser(manager)
    set_checkpoint_manager(used)
    return used


@pytest.fixture(params=["manager", "streams"])
def either(request):
    """A store, and a manager that knows streams only."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def held(streams, monkeypatch):
    """Storage that hangs: `begun` is set when something is written, which waits for `allowed`."""
    made = SimpleNamespace(begun=threading.Event(), allowed=threading.Event())
    create = after(made.allowed, streams.create_checkpoint)
    monkeypatch.setattr(streams, "create_checkpoint", lambda: made.begun.set() or create())
    return made


def steps(manager):
    return [
        found.step if found.step is not None else saving._step_of(found)
        for found in manager.list_checkpoints()
    ]


def left_over(manager):
    """What is there of checkpoints, finished or not."""
    return [path.name for path in manager.directory.iterdir() if path.is_dir()]


def test_a_state_comes_back_with_its_step(either):
    state = Number(3)
    assert checkpoint.load_latest(state) is None
    assert state.value == 3
    checkpoint.save(Number(41), 7)
    checkpoint.save(Number(42), 9)
    checkpoint.finish()
    assert checkpoint.load_latest(state) == 9
    assert state.value == 42
    poll_for(
        lambda: "torchelastic-checkpoint" not in [t.name for t in threading.enumerate()],
        what="the end of the writer's thread",
    )


def test_no_manager_no_checkpoints():
    assert checkpoint.get_checkpoint_manager() is None
    checkpoint.save(Number(1), 1)
    checkpoint.finish()
    assert checkpoint.load_latest(Number()) is None


def test_saving_does_not_wait_for_storage_and_keeps_what_was_then(manager, held):
    state = Number(1)
    checkpoint.save(state, 1)  # returns, although nothing can be written
    state.value = 2
    assert manager.list_checkpoints() == []
    held.allowed.set()
    checkpoint.finish()
    loaded = Number()
    assert checkpoint.load_latest(loaded) == 1
    assert loaded.value == 1


def test_storage_that_is_too_slow_gets_the_newest_and_the_log_says_so(manager, held, caplog):
    checkpoint.save(Number(1), 1)
    assert held.begun.wait(30)
    checkpoint.save(Number(2), 2)
    checkpoint.save(Number(3), 3)
    held.allowed.set()
    checkpoint.finish()
    assert steps(manager) == [3, 1]
    assert "Skipped the checkpoint of step 2" in caplog.text


def test_a_failed_write_is_reported_and_leaves_nothing_behind(either, caplog):
    faults.plan("raise@place=checkpoint.write,generation=any")
    checkpoint.save(Number(1), 1)
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 1"):
        checkpoint.finish()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert left_over(either) == []
    checkpoint.finish()  # told once


def test_training_goes_on_however_often_a_write_fails(either, caplog):
    faults.plan(EVERY_WRITE_FAILS)
    for step in range(3):
        checkpoint.save(Number(step), step)
        checkpoint.wait()  # raises nothing: that is left to finish
    assert caplog.text.count("Training continues") == 3
    assert "(3 failures in a row)" in caplog.text
    assert left_over(either) == []
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 2"):
        checkpoint.finish()


def test_a_checkpoint_that_cannot_be_made_keeps_its_cause(manager):
    manager.directory.rmdir()
    manager.directory.touch()
    checkpoint.save(Number(1), 1)
    with pytest.raises(CheckpointError, match=r"File exists|Not a directory") as caught:
        checkpoint.finish()
    assert isinstance(caught.value.__cause__, OSError)


class Stubborn(Checkpoint):
    """Can neither be written nor discarded."""

    def open_output_stream(self, key):
        raise OSError("the first cause")

    def open_input_stream(self, key):
        raise KeyError(key)

    def commit(self):
        raise AssertionError("not to be committed")

    def discard(self):
        raise OSError("the second")


def test_a_failed_discard_does_not_hide_what_failed_first(streams, monkeypatch, caplog):
    monkeypatch.setattr(streams, "create_checkpoint", Stubborn)
    checkpoint.save(Number(1), 1)
    with pytest.raises(CheckpointError, match="the first cause"):
        checkpoint.finish()
    assert "the second" in caplog.text


def test_a_state_that_cannot_be_saved_tells_its_own_error(either):
    class Broken(Number):
        def save(self, stream):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        checkpoint.save(Broken(), 1)
    checkpoint.finish()
    assert either.list_checkpoints() == []


def test_a_checkpoint_that_cannot_be_loaded_says_which_and_what_to_do(streams):
    with (made := streams.create_checkpoint()).open_output_stream("default") as stream:
        stream.write(b"no number")
    made.commit()
    with pytest.raises(CheckpointError, match=r"checkpoints/0.*remove it") as caught:
        checkpoint.load_latest(Number())
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_checkpoint_without_a_step_counts_from_0_and_says_so(streams, caplog):
    with (made := streams.create_checkpoint()).open_output_stream("default") as stream:
        stream.write(b"5")
    made.commit()
    state = Number()
    assert checkpoint.load_latest(state) == 0
    assert state.value == 5
    assert "does not name its step" in caplog.text


def test_another_manager_comes_after_what_was_begun(manager, tmp_path):
    checkpoint.save(Number(1), 1)
    second = checkpoint.FileSystemCheckpointManager(tmp_path / "second")
    set_checkpoint_manager(second)
    checkpoint.save(Number(2), 2)
    checkpoint.finish()
    assert steps(manager) == [1]
    assert steps(second) == [2]


def test_a_manager_that_nothing_asks_for_checkpoints_is_reported(manager, tmp_path, caplog):
    checkpoint.warn_if_never_due()
    assert "no interval is set" in caplog.text
    caplog.clear()
    for other in (None, checkpoint.FileSystemCheckpointManager(tmp_path, every=5)):
        set_checkpoint_manager(other)
        checkpoint.warn_if_never_due()
    assert caplog.text == ""


# --- the runner -----------------------------------------------------------------------------------


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
