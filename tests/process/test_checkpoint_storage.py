"""Real storage that is full, read-only or gone in between; and a real process that writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.support import poll_for
from torchelastic import faults
from torchelastic.checkpoint import CheckpointStore
from torchelastic.checkpoint import store as store_module
from torchelastic.errors import CheckpointError

PATIENCE = 90.0
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


@pytest.mark.needs("mount")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_costs_one_checkpoint_and_no_training(store, disk, caplog, writer):
    one = store(disk, writer=writer)
    saved(one, 1)
    saved(one, 2)
    one.save(state(3), 3)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written.*No space left"):
        one.finish()
    assert "the training goes on" in caplog.text
    assert steps(one) == [2, 1]
    assert one.load().tree["n"] == 2
    assert list(disk.glob(".new-*")) == [], "what was written of it gives its room back"
    mount(disk, "remount,size=2m")
    saved(one, 4)
    assert one.load().tree["n"] == 4


@pytest.mark.needs("mount")
@pytest.mark.parametrize("writer", WRITERS)
def test_read_only_storage_costs_no_training(store, disk, caplog, writer):
    one = store(disk, writer=writer)
    saved(one, 1)
    mount(disk, "remount,ro")
    for step in (2, 3):
        assert one.save(state(step), step)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            one.finish()
    assert one.load().tree["n"] == 1
    mount(disk, "remount,rw")
    saved(one, 4)
    assert steps(one) == [4, 1]


@pytest.mark.parametrize("writer", WRITERS)
def test_storage_that_fails_every_third_time(store, monkeypatch, caplog, writer):
    plan = ";".join(
        f"raise@place=checkpoint.write,step={step},generation=any" for step in (3, 6, 9)
    )
    monkeypatch.setenv("TORCHELASTIC_FAULTS", plan)
    faults.load()
    one = store(writer=writer, keep_last=2)
    good: list[int] = []
    for step in range(1, 10):
        faults.position(rank=0, step=step, generation=0)  # for the thread; a process has its own
        assert one.save(state(step), step)
        if step % 3 == 0:
            with pytest.raises(CheckpointError, match=f"step {step} could not be written"):
                one.finish()
        else:
            one.finish()
            good.append(step)
        assert one.load().step == good[-1], "the one before stays"
    assert caplog.text.count("the training goes on, the last good one stays") == 3
    assert steps(one) == good[-1:-3:-1]


@pytest.mark.slow
def test_slow_storage_costs_checkpoints_and_no_training(store, monkeypatch, caplog):
    """It hangs until somebody looks after it; steps go on, and the log says what is left out."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "stop@place=checkpoint.write,step=2,generation=any")
    one = store(writer="process")
    monkeypatch.setattr(store_module, "LARGE", 1)
    saved(one, 1)
    child = one._process._process.pid
    assert one.save(state(2), 2)
    poll_for(lambda: status(child) == "T", what="storage that hangs", timeout=PATIENCE)
    for step in (3, 4):
        assert not one.save(state(step), step)
        assert f"No checkpoint of step {step}: the one before is still being" in caplog.text
    assert one.load().step == 1
    os.kill(child, signal.SIGCONT)
    one.finish()
    assert steps(one) == [2, 1]
    saved(one, 5)
    assert steps(one) == [5, 2, 1]


@pytest.mark.slow
def test_a_process_writes(store):
    one = store(writer="process")
    saved(one, 1)
    child = one._process._process
    saved(one, 2)
    assert one._process._process is child, "one for all of them"
    assert torch.equal(one.load().tree["w"], state(2)["w"])
    one.close()
    assert child.poll() is not None


@pytest.mark.slow
def test_a_killed_writer_costs_one_checkpoint(store, caplog):
    one = store(writer="process")
    saved(one, 1)
    one._process._process.kill()
    assert one.save(state(2), 2)
    with pytest.raises(CheckpointError, match=r"has ended \(exit code -9\)"):
        one.finish()
    saved(one, 3)
    assert steps(one) == [3, 1]


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


def alive(pid):
    return status(pid) not in ("", "Z")


def status(pid):
    """The letter that /proc has for it; none where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
