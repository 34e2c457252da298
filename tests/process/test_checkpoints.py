"""Checkpoints of in-process workers: what is left when all are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.chaos_driver import kill_all
from tests.process.jobs import Job, Node, job
from tests.support import poll_for
from torchelastic.checkpoint import FileSystemCheckpointManager

COUNTING = Path(__file__).with_name("counting.py")
ONE_NODE = "--nnodes=1 --nproc-per-node=2 --world-sizes=2"
PATIENCE = 120.0


def begins(node: Node) -> list[int]:
    return [int(step) for step in re.findall(r"begin at (\d+) ", node.stdout)]


def done(node: Node) -> int:
    """The steps that its workers are known to have done."""
    return max((step for told in node.events("progress") for step in told["steps"]), default=0)


@pytest.mark.timeout(600)
def test_a_job_in_three_starts(tmp_path, monkeypatch):
    """One after the other, four nodes in all, which import torch.

    1. A worker killed while it writes leaves no half checkpoint; its peer has the steps since, and
       none is loaded over them, as 0.1 did. Storage that fails for a while stops no step, and is
       told. Then the whole node is killed.
    2. The next nodes begin from the latest checkpoint. SIGTERM to both: the state is stored, once,
       though nothing else has asked for it.
    3. The last one begins where they ended, and comes to the end with the right sum.
    """
    names = ("checkpoints", "disk", "broken", "mended")
    path, disk, broken, mended = (tmp_path / name for name in names)
    disk.mkdir()
    path.symlink_to(disk)  # what takes its place does so at once
    broken.touch()
    mended.symlink_to(disk)
    stored = FileSystemCheckpointManager(path)

    def steps() -> list[int]:
        return [found.step for found in stored.list_checkpoints()]

    def start(made: Job, steps: int, seconds: float = 0.0, every: int = 0) -> Node:
        words = [stored.directory, steps, seconds, every]
        return made.start(script=[str(COUNTING), *map(str, words)])

    def wait_for_newer(than: int) -> None:
        poll_for(lambda: steps()[:1] > [than], what=f"one after {than}", timeout=PATIENCE)

    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=checkpoint.write,rank=0")
    with job(tmp_path / "first", ONE_NODE) as first:
        node = start(first, 100_000, 0.01, every=5)
        wait_for_newer(0)
        assert [ended["exitcode"] for ended in node.events("worker-exited")] == [-9]
        broken.replace(path)
        told = r"Could not write the checkpoint of step (\d+)"
        failed = poll_for(lambda: re.search(told, node.stderr), what=told, timeout=PATIENCE)
        mended.replace(path)
        wait_for_newer(int(failed[1]))
        kill_all([node])
    assert begins(node)[:2] == [0, 0]
    assert min(begins(node)[2:]) >= 5
    assert len(begins(node)) == 4
    before = steps()
    assert {step % 5 for step in before} == {0}, before
    monkeypatch.delenv("TORCHELASTIC_FAULTS")

    with job(tmp_path / "second", "--nnodes=2 --nproc-per-node=1") as second:
        nodes = [start(second, 100_000, 0.01) for _ in range(2)]
        for node in nodes:
            poll_for(lambda node=node: done(node) > before[0], what="a step", timeout=PATIENCE)
        for node in nodes:
            node.process.terminate()
        assert [node.wait(PATIENCE) for node in nodes] == [143, 143], second.said()
    assert [begins(node) for node in nodes] == [before[:1]] * 2
    (left,) = set(steps()) - set(before)

    with job(tmp_path / "third", ONE_NODE) as third:
        node = start(third, left + 3)
        assert node.wait(PATIENCE) == 0, node.stderr
    assert begins(node) == [left, left]
    end = left + 3
    assert node.stdout.count(f"end at {end} with {end * (end + 1) // 2}\n") == 2
    assert steps()[0] == left
    assert list(stored.directory.glob(".new-*")) == []
