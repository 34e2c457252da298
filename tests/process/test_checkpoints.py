"""Checkpoints of real workers: what is left when all are gone, and what is not touched before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.jobs import job
from tests.support import poll_for
from torchelastic.checkpoint import FileSystemCheckpointManager

COUNTING = Path(__file__).with_name("counting.py")
FLAGS = "--nnodes=1 --nproc-per-node=2 --world-sizes=2"
PATIENCE = 90.0


def total(steps):
    return steps * (steps + 1) // 2


def ends(text):
    return re.findall(r"end at (\d+) with (\d+)", text)


def begins(text):
    return [int(step) for step in re.findall(r"begin at (\d+) ", text)]


@pytest.fixture
def stored(tmp_path):
    return FileSystemCheckpointManager(tmp_path / "checkpoints")


def steps_of(manager):
    return [found.step for found in manager.list_checkpoints()]


def counting(manager, steps, seconds=0.0, every=5):
    return [str(COUNTING), str(manager.directory), str(steps), str(seconds), str(every)]


def test_when_all_are_gone_the_next_ones_begin_from_the_latest(stored, tmp_path):
    with job(tmp_path / "first", FLAGS) as first:
        node = first.start(script=counting(stored, 100_000, 0.01))
        poll_for(lambda: len(steps_of(stored)) >= 2, what="checkpoints", timeout=PATIENCE)
        node.kill()
    latest = steps_of(stored)[0]
    assert latest % 5 == 0
    with job(tmp_path / "second", FLAGS) as second:
        node = second.start(script=counting(stored, latest + 3))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert begins(node.stdout) == [latest, latest]
    assert ends(node.stdout) == [(str(latest + 3), str(total(latest + 3)))] * 2
    assert steps_of(stored)[0] == latest


def test_a_worker_killed_while_it_writes_leaves_no_half_checkpoint(stored, tmp_path, monkeypatch):
    """Its peer has the steps since, and no checkpoint is loaded over them, as 0.1 did."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=checkpoint.write,rank=0,generation=0")
    with job(tmp_path / "job", FLAGS) as one:
        node = one.start(script=counting(stored, 24, 0.02))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert [ended["exitcode"] for ended in node.events("worker-exited")] == [-9, 0, 0]
    assert begins(node.stdout)[:2] == [0, 0]
    assert min(begins(node.stdout)[2:]) >= 5
    assert ends(node.stdout) == [("24", str(total(24)))] * 2
    assert steps_of(stored) == [20, 15, 10]
    assert list(stored.directory.glob(".new-*")) == []


def test_storage_that_fails_stops_no_step_and_is_told(stored, tmp_path, monkeypatch):
    """The first checkpoint fails, the training goes on, the next one is good."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "raise@place=checkpoint.write,step=5")
    with job(tmp_path / "job", FLAGS) as one:
        node = one.start(script=counting(stored, 12, 0.02))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert "The checkpoint of step 5 could not be written" in node.stderr
    assert ends(node.stdout) == [("12", str(total(12)))] * 2
    assert steps_of(stored) == [10]


def test_before_a_job_leaves_its_state_is_stored(stored, tmp_path):
    """Nothing else has asked for a checkpoint; the next job begins where this one ended."""
    with job(tmp_path / "first", FLAGS) as first:
        node = first.start(script=counting(stored, 100_000, 0.01, every=0))
        poll_for(lambda: begins(node.stdout), what="the training", timeout=PATIENCE)
        node.process.terminate()
        assert node.wait(PATIENCE) == 143, node.stderr
    (step,) = steps_of(stored)
    with job(tmp_path / "second", FLAGS) as second:
        node = second.start(script=counting(stored, step + 2, every=0))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert begins(node.stdout) == [step, step]
    assert ends(node.stdout) == [(str(step + 2), str(total(step + 2)))] * 2
