"""Managers of streams: a checkpoint is there whole or not at all, and saving stops nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support import poll_for
from tests.unit.checkpoint.conftest import Number, after
from torchelastic import checkpoint, faults
from torchelastic.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointUtil,
    FileSystemCheckpointManager,
    saving,
    set_checkpoint_manager,
)
from torchelastic.errors import CheckpointError, ConfigError


def commit(manager, content):
    checkpoint = manager.create_checkpoint()
    with checkpoint.open_output_stream("default") as stream:
        stream.write(content)
    checkpoint.commit()
    return checkpoint


def read(checkpoint, key="default"):
    with checkpoint.open_input_stream(key) as stream:
        return stream.read()


def directories(manager):
    return sorted(path.name for path in manager.directory.iterdir() if path.is_dir())


def numbers(manager):
    """The ids of what is there, and nothing that is half done."""
    assert [name for name in directories(manager) if name.startswith(".")] == []
    return [int(name.partition("-")[0]) for name in directories(manager)]


def test_checkpoint_is_visible_only_after_commit(manager):
    checkpoint = manager.create_checkpoint()
    with checkpoint.open_output_stream("default") as stream:
        stream.write(b"the second is shorter")
    checkpoint.open_output_stream("default").write(b"buffered")
    assert manager.get_latest_checkpoint() is None
    assert manager.list_checkpoints() == []
    checkpoint.commit()
    checkpoint.commit()
    assert read(manager.get_latest_checkpoint()) == b"buffered"
    assert len(manager.list_checkpoints()) == 1


def test_committed_streams_are_read_back_and_others_raise(manager):
    assert manager.get_checkpoint(0) is None
    commit(manager, b"first")
    done = commit(manager, b"second")
    assert read(manager.get_latest_checkpoint()) == b"second"
    assert [read(found) for found in manager.list_checkpoints()] == [b"second", b"first"]
    assert read(manager.get_checkpoint(0)) == b"first"
    assert manager.get_checkpoint(2) is None
    with pytest.raises(FileNotFoundError):
        done.open_input_stream("other")
    with pytest.raises(CheckpointError, match="create a new checkpoint"):
        done.open_output_stream("more")


def test_discard_removes_a_draft_and_a_committed_one(manager):
    commit(manager, b"kept")
    checkpoint = manager.create_checkpoint()
    checkpoint.open_output_stream("default").write(b"half")
    for discarded in (checkpoint, checkpoint, commit(manager, b"regretted")):
        discarded.discard()
    assert numbers(manager) == [0]
    assert read(manager.get_latest_checkpoint()) == b"kept"
    with pytest.raises(CheckpointError, match="was discarded"):
        checkpoint.commit()


def test_a_key_is_a_plain_name(manager):
    for key in ("", "../x", "a/b", ".hidden", "commit.json"):
        with pytest.raises(ConfigError, match="plain file name"):
            manager.create_checkpoint().open_output_stream(key)


# --- half a checkpoint ---------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from torchelastic.checkpoint import FileSystemCheckpointManager
checkpoint = FileSystemCheckpointManager(sys.argv[1]).create_checkpoint()
stream = checkpoint.open_output_stream("default")
stream.write(b"half")
stream.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_process_are_cleared(manager):
    commit(manager, b"whole")
    subprocess.run([sys.executable, "-c", KILLED, manager.directory], timeout=60)
    assert directories(manager)[0].startswith(".new-000001-")
    assert read(manager.get_latest_checkpoint()) == b"whole"
    commit(manager, b"newer")
    assert len(numbers(manager)) == 2
    assert read(manager.get_latest_checkpoint()) == b"newer"


def test_half_a_removal_is_no_checkpoint_and_is_completed(manager):
    whole = commit(manager, b"whole").directory
    os.rename(manager.directory / whole, manager.directory / f".old-{whole}")
    assert manager.get_latest_checkpoint() is None
    commit(manager, b"next")
    assert len(numbers(manager)) == 1


# --- several writers -----------------------------------------------------------------------------


def test_drafts_of_another_writer_stay(manager):
    """A manager of its own stands for another process: locks belong to the opened directory."""
    other = FileSystemCheckpointManager(manager.directory).create_checkpoint()
    other.open_output_stream("default").write(b"slow")
    assert commit(manager, b"quick").sequence_id == 1
    other.commit()
    assert read(manager.get_checkpoint(0)) == b"slow"
    assert read(manager.get_latest_checkpoint()) == b"quick"


def test_one_that_was_dropped_is_no_longer_locked(manager):
    manager.create_checkpoint()
    commit(manager, b"next")
    assert len(numbers(manager)) == 1


def test_writers_side_by_side_get_ids_of_their_own(manager):
    """Each with a manager of its own, retention in between; nobody fails and nothing is torn."""

    def work(name):
        own = FileSystemCheckpointManager(manager.directory, keep_last=3)
        for turn in range(10):
            commit(own, f"{name} {turn}".encode() * 100)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))
    commit(FileSystemCheckpointManager(manager.directory, keep_last=3), b"last")
    assert len(manager.list_checkpoints()) == 3
    assert read(manager.get_latest_checkpoint()) == b"last"
    assert len(numbers(manager)) == 3


# --- retention -----------------------------------------------------------------------------------


def test_a_new_checkpoint_is_good_although_an_old_one_cannot_be_removed(tmp_path, caplog):
    manager = FileSystemCheckpointManager(tmp_path, keep_last=1)
    old = commit(manager, b"old")
    checkpoint = manager.create_checkpoint()
    (tmp_path / f".old-{old.directory}").write_bytes(b"in the way")
    checkpoint.commit()
    assert manager.get_latest_checkpoint().sequence_id == 1
    assert "Could not remove old checkpoints" in caplog.text


def test_no_descriptor_is_left(manager):
    before = len(os.listdir("/proc/self/fd"))
    commit(manager, b"one")
    manager.create_checkpoint().discard()
    manager.list_checkpoints()
    assert len(os.listdir("/proc/self/fd")) == before


# --- CheckpointUtil -------------------------------------------------------------------------------


class Coordinator:
    def __init__(self, save=False):
        self.save = save

    def should_save_checkpoint(self):
        return self.save


class Asked(Number):
    """Wants a checkpoint after every second step."""

    def should_save_checkpoint(self, rank):
        return self.value % 2 == 0


def test_rank_0_saves_when_the_state_wants_it(manager):
    util = CheckpointUtil(Coordinator())
    state = Asked()
    for _ in range(4):
        state.value += 1
        util.save_checkpoint(state, rank=0)
        checkpoint.finish()
    assert len(manager.list_checkpoints()) == 2
    fresh = Asked()
    other = CheckpointUtil(Coordinator())
    assert other.load_checkpoint(fresh, rank=0) is fresh
    assert (fresh.value, other.step) == (4, 4)


@pytest.mark.parametrize(("rank", "saved"), [(0, 1), (1, 0)])
def test_one_rank_saves_when_the_coordinator_wants_it(manager, rank, saved):
    CheckpointUtil(Coordinator(save=True)).save_checkpoint(Asked(1), rank=rank)
    checkpoint.finish()
    assert len(manager.list_checkpoints()) == saved


def test_rank_0_loads_once(manager):
    """0.1 compared a pair with 1 and so overwrote fresher memory at every rendezvous."""
    checkpoint.save(Number(5), 1)
    checkpoint.finish()
    util = CheckpointUtil(Coordinator())
    assert util.load_checkpoint(Asked(1), rank=1).value == 1
    state = util.load_checkpoint(Asked(), rank=0)
    assert state.value == 5
    util.set_checkpoint_loaded()
    state.value = 99
    assert util.load_checkpoint(state, rank=0).value == 99


def test_without_a_manager_nothing_happens():
    util = CheckpointUtil(Coordinator(save=True))
    util.save_checkpoint(Asked(2), rank=0)
    assert util.load_checkpoint(Asked(2), rank=0).value == 2


def test_checkpoints_are_imported_without_torch():
    program = "import sys, torchelastic.checkpoint; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "False\n"


# --- saving stops nobody, loses nothing silently, and carries the step ----------------------------


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
    """All files of checkpoints, finished or not."""
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
