"""A checkpoint is there as a whole or not at all, whoever is killed and whoever else writes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.unit.checkpoint.conftest import Number
from torchelastic import checkpoint
from torchelastic.checkpoint import CheckpointUtil, FileSystemCheckpointManager
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


def test_committed_streams_are_read_back(manager):
    commit(manager, b"first")
    commit(manager, b"second")
    assert read(manager.get_latest_checkpoint()) == b"second"
    assert [read(found) for found in manager.list_checkpoints()] == [b"second", b"first"]
    assert read(manager.get_checkpoint(0)) == b"first"


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


def test_missing_streams_and_finished_checkpoints_raise(manager):
    assert manager.get_checkpoint(0) is None
    done = commit(manager, b"there")
    assert manager.get_checkpoint(1) is None
    with pytest.raises(FileNotFoundError):
        done.open_input_stream("other")
    with pytest.raises(CheckpointError, match="create a new checkpoint"):
        done.open_output_stream("more")


def test_discard_removes_what_was_written(manager):
    checkpoint = manager.create_checkpoint()
    checkpoint.open_output_stream("default").write(b"half")
    checkpoint.discard()
    checkpoint.discard()
    assert directories(manager) == []
    with pytest.raises(CheckpointError, match="was discarded"):
        checkpoint.commit()


def test_discard_removes_a_committed_one(manager):
    commit(manager, b"kept")
    commit(manager, b"regretted").discard()
    assert numbers(manager) == [0]
    assert read(manager.get_latest_checkpoint()) == b"kept"


def test_a_key_is_a_plain_name(manager):
    for key in ("", "../x", "a/b", ".hidden", "commit.json"):
        with pytest.raises(ConfigError, match="plain file name"):
            manager.create_checkpoint().open_output_stream(key)


# --- half a checkpoint ---------------------------------------------------------------------------


def test_half_a_checkpoint_is_never_the_latest(manager):
    """As 0.1, or a copy that was interrupted, leaves it."""
    commit(manager, b"whole")
    directory = manager.directory / "000005-abcdef"
    directory.mkdir()
    (directory / "default").write_bytes(b"hal")
    assert read(manager.get_latest_checkpoint()) == b"whole"
    assert len(manager.list_checkpoints()) == 1
    commit(manager, b"newer")
    assert read(manager.get_latest_checkpoint()) == b"newer"


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
    problems = []

    def work(name):
        own = FileSystemCheckpointManager(manager.directory, keep_last=3)
        try:
            for turn in range(10):
                commit(own, f"{name} {turn}".encode() * 100)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
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
