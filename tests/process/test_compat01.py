"""Programs written for release 0.1 run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.jobs import job
from torchelastic.checkpoint import FileSystemCheckpointManager

USER = Path(__file__).with_name("user01.py")


def run(tmp_path, name):
    with job(tmp_path / name, "--nnodes=1 --nproc-per-node=2 --world-sizes=2") as one:
        node = one.start(script=[str(USER), str(tmp_path / f"{name}-checkpoints"), "60"])
        assert node.wait(90) == 0, node.stderr
    return node


def results(text):
    return re.findall(r"steps 60 epoch (\d+) index (\d+) sum (\S+)", text)


@pytest.mark.slow
def test_a_program_of_01_comes_to_the_same_when_a_worker_is_killed(tmp_path, monkeypatch):
    quiet = run(tmp_path, "quiet")
    assert quiet.events("worker-failed") == []
    first, second = results(quiet.stdout)
    assert first == second
    # An epoch has 48 samples for each of the two ranks.
    assert first[:2] == ("1", "24")
    assert "][user]: __main__.train_step.success=1" in quiet.stdout
    manager = FileSystemCheckpointManager(tmp_path / "quiet-checkpoints")
    assert manager.get_latest_checkpoint() is not None

    fault = "kill@place=collective.launched,rank=1,step=30"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", fault)
    disturbed = run(tmp_path, "disturbed")
    assert [ended["exitcode"] for ended in disturbed.events("worker-exited")] == [-9, 0, 0]
    assert results(disturbed.stdout) == [first, first]
