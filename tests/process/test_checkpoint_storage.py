"""Real storage: full, read-only, gone in between, at S3; and who else loads what was saved."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.process import forked, reshard
from tests.process.jobs import alive, state_of
from tests.process.s3 import s3_server
from tests.support import poll_for
from torchelastic import faults
from torchelastic.checkpoint import CheckpointStore
from torchelastic.checkpoint import checkpoint_store as store_module
from torchelastic.errors import CheckpointError

#: A process that writes lets all others go first: on a busy machine its imports take long.
PATIENCE = 300.0
pytestmark = pytest.mark.timeout(600)
#: Bytes of the state.
SIZE = 400_000
WRITERS = ["thread", pytest.param("process", marks=pytest.mark.slow)]


def state(value):
    return {"w": torch.full((SIZE // 4,), float(value)), "n": value}


def steps(store):
    return [found.step for found in store.list_checkpoints()]


@pytest.fixture
def store(request, tmp_path):
    opened = []

    def make(path=tmp_path, **options):
        opened.append(CheckpointStore(path, **options))
        return opened[-1]

    yield make
    faults.plan("")
    for one in opened:
        one.close()


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MB: two checkpoints fit, the third does not."""
    path = tmp_path / "disk"
    path.mkdir()
    mount(path, "size=1m")
    yield path
    subprocess.run(["umount", path], check=True)


def mount(path, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
    subprocess.run(command, check=True)


def saved(store, step):
    assert store.save(state(step), step)
    store.finish()


def fails(store, step, why):
    assert store.save(state(step), step)
    with pytest.raises(
        CheckpointError, match=rf"Could not write the checkpoint of step {step}.*{why}"
    ):
        store.finish()


@pytest.mark.needs("mount")
@pytest.mark.parametrize("writer", WRITERS)
def test_storage_that_fails_costs_checkpoints_and_no_training(
    store, disk, monkeypatch, caplog, writer
):
    """It is full, then read-only, then fails now and then: what was good before stays."""
    plan = ";".join(f"raise@place=checkpoint.write,step={n},generation=any" for n in (8, 10))
    monkeypatch.setenv("TORCHELASTIC_FAULTS", plan)
    faults.load()
    one = store(disk, writer=writer, keep_last=3)
    saved(one, 1)
    saved(one, 2)
    fails(one, 3, "No space left")
    assert steps(one) == [2, 1]
    assert one.load().tree["n"] == 2
    assert list(disk.glob(".new-*")) == [], "what was written of it gives its room back"

    mount(disk, "remount,size=4m")
    saved(one, 4)
    mount(disk, "remount,ro")
    for step in (5, 6):
        fails(one, step, "Read-only file system")
    assert one.load().tree["n"] == 4
    mount(disk, "remount,rw")

    for step in range(7, 12):
        faults.position(rank=0, step=step, generation=0)  # for the thread; a process has its own
        if step in (8, 10):
            fails(one, step, "")
            assert one.load().step == step - 1
        else:
            saved(one, step)
    assert steps(one) == [11, 9, 7]
    assert caplog.text.count("Training continues; earlier checkpoints stay") == 5


@pytest.mark.slow
def test_one_process_writes_all(store, monkeypatch, caplog):
    """Storage that hangs until somebody looks after it stops no step: the log says what is left
    out. A killed writer costs one checkpoint."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "stop@place=checkpoint.write,step=2,generation=any")
    one = store(writer="process")
    monkeypatch.setattr(store_module, "LARGE", 1)
    saved(one, 1)
    child = one._process._process
    assert one.save(state(2), 2)
    poll_for(lambda: state_of(child.pid) == "T", what="storage that hangs", timeout=PATIENCE)
    for step in (3, 4):
        assert not one.save(state(step), step)
        assert (
            f"Skipped the checkpoint of step {step}: the one before is still being" in caplog.text
        )
    assert one.load().step == 1
    child.send_signal(signal.SIGCONT)
    one.finish()
    saved(one, 5)
    assert steps(one) == [5, 2, 1]
    assert one._process._process is child, "one for all of them"
    assert torch.equal(one.load().tree["w"], state(5)["w"])

    child.kill()
    fails(one, 6, r"died \(exit code -9\)")
    saved(one, 7)
    assert steps(one) == [7, 5, 2, 1]
    child = one._process._process
    one.close()
    assert child.poll() is not None


KILLED = """
import os, signal, sys, torch
from torchelastic.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], writer="process")
store.save({"w": torch.zeros(1)}, 1)
store.finish()
print(store._process._process.pid, flush=True)
store.save({"w": torch.zeros(30_000_000)}, 2)
while not any(name.startswith(".new-") for name in os.listdir(sys.argv[1])):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_writer_of_a_killed_training_ends_with_it(store, tmp_path):
    path = tmp_path / "checkpoints"
    command = [sys.executable, "-c", KILLED, path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    writer = int(ended.stdout)
    poll_for(lambda: not alive(writer), what="the end of the writer", timeout=PATIENCE)
    one = store(path)
    assert steps(one) == [1]
    saved(one, 3)
    assert steps(one) == [3, 1]
    assert list(path.glob(".new-*")) == []


# --- S3 ------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
@pytest.mark.timeout(900)
def test_checkpoints_at_an_s3_server(tmp_path):
    """The server, the script and the process that writes import what takes seconds."""
    with s3_server(tmp_path) as endpoint:
        command = [sys.executable, "-m", "tests.process.s3", endpoint]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr


# --- sharded state, loaded by another number of ranks (FSDP2 over gloo) --------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forks")
def test_two_ranks_save_and_others_load(tmp_path):
    """The process that writes imports torch."""
    with forked.ranks(reshard.save, [0, 1], 2, tmp_path / "checkpoints", "process") as answers:
        assert answers == {0: "saved", 1: "saved"}
    found = CheckpointStore(tmp_path / "checkpoints").list_checkpoints()
    for one in found:
        files = {path.name for path in (tmp_path / "checkpoints" / one.directory).iterdir()}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata", "commit.json"}
    for size in (3, 1):
        ranks = list(range(size))
        with forked.ranks(reshard.load, ranks, size, tmp_path / "checkpoints") as answers:
            own = [[0], [1], None][:size]
            assert answers == {rank: (found[0].step, own[rank]) for rank in ranks}
