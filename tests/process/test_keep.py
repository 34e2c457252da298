"""Run + keep: plain scripts whose workers and nodes are killed go on as if nothing had been.

Before a script trains, it writes down what comes out of a training that nobody interrupts: each
step that is done later, in whatever generation, must have the same bits.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.process.jobs import HERE, Job, job
from tests.support import SOAK, poll_for
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.data.checker import main

KEPT = HERE / "kept.py"
EXAMPLE = HERE.parents[1] / "examples" / "keep.py"
#: Fewer restarts than there are kills: a job that gets further has them again.
ONE_NODE = "--nnodes=1 --nproc-per-node=2 --max-restarts=3"
THREE_RANKS = ONE_NODE.replace("node=2", "node=3")
PATIENCE = 120.0

#: Several workers import torch at the same time, on however few cores.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def stored(tmp_path):
    return FileSystemCheckpointManager(tmp_path / "checkpoints")


def steps_of(stored: FileSystemCheckpointManager) -> list[int]:
    return [found.step for found in stored.list_checkpoints()]


def latest(made: Job, event: str, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of the latest generation that has such."""
    lines = made.lines(event=event, **wanted)
    newest = max((line["generation"] for line in lines), default=0)
    return [line for line in lines if line["generation"] == newest]


def holding(made: Job, step: int, ranks: int, since: int = 0) -> list[dict[str, Any]]:
    """Wait until all ranks of a world of this size wait before a step, in the latest generation."""

    def found() -> list[dict[str, Any]]:
        lines = latest(made, "holding", step=step, world_size=ranks)
        return lines if len(lines) == ranks and lines[0]["generation"] >= since else []

    return made.wait_for(found, f"{ranks} ranks that wait at step {step}", PATIENCE)


def starts(made: Job, generation: int) -> list[int]:
    """Where the ranks of a generation went on from."""
    return [line["step"] for line in made.lines(event="start", generation=generation)]


def has_expected_bits(made: Job, steps: int, ranks: int = 2) -> None:
    """Each step that any rank has done in any generation, and all of them were; who is killed right
    after a commit has not told of it."""
    expected, done = (
        {(line["rank"], line["step"], line["fingerprint"]) for line in made.lines(event=event)}
        for event in ("expected", "step")
    )
    expected = {line for line in expected if line[1] <= steps}
    assert done <= expected
    assert {step for _, step, _ in done} == {step for _, step, _ in expected}
    assert len(expected) == ranks * steps


#: What is done to each generation, and where the next one goes on. Rank 0 writes the shared state:
#: when rank 1 dies in the next step, rank 0 may have sealed the last one, or not yet.
KILLS = [
    ("place=step.begin,rank=1,step=2", {1, 2}),
    ("place=snapshot.copy,rank=0,step=4", {3}),
    # In the first step of a generation, where the base is all there is.
    ("place=snapshot.sealing,n=2,rank=0,step=4", {3}),
    ("place=snapshot.begun,n=2,rank=0,step=6", {5}),
    ("place=snapshot.begun,n=1,rank=1,step=8", {6, 7}),
    ("place=snapshot.skeleton,n=2,rank=0,step=10", {9}),
]


def test_workers_are_killed_again_and_again_and_then_all_agents(stored, tmp_path, monkeypatch):
    """A kill loses the step in flight, at most the one before, too, and changes no bit: with three
    ranks, DDP's buckets decide the last one of a sum.

    When all agents are gone the last checkpoint is left. Who then has too little time to write
    another before it leaves (the last is said to have taken an hour) just goes. Two nodes import
    torch, one after the other.
    """
    kills = [f"kill@{kill},generation={number}" for number, (kill, _) in enumerate(KILLS)]
    monkeypatch.setenv("TORCHELASTIC_FAULTS", ";".join(kills))
    keys = {"steps": 16, "hold": 14, "checkpoints": stored.directory}
    with job(tmp_path / "first", THREE_RANKS, KEPT, expected=1, **keys) as first:
        node = first.start()
        holding(first, 14, ranks=3)
        poll_for(lambda: steps_of(stored)[:1] == [12], what="the checkpoint of 12")
        node.kill()
    for generation, (kill, wanted) in enumerate(KILLS, 1):
        begun = starts(first, generation)
        assert len(begun) == 3, f"after {kill}\n{first.said()}"
        assert len(set(begun)) == 1, f"after {kill}"
        assert set(begun) <= wanted, f"after {kill}"
    has_expected_bits(first, 14, ranks=3)

    monkeypatch.delenv("TORCHELASTIC_FAULTS")
    flags = f"{THREE_RANKS} --shutdown-timeout=20"
    with job(tmp_path / "second", flags, KEPT, took=3600, **keys) as second:
        node = second.start()
        holding(second, 14, ranks=3)
        node.process.terminate()
        assert node.wait(PATIENCE) == 143, node.stderr
    assert starts(second, 0) == [12, 12, 12]
    assert steps_of(stored)[0] == 12


@pytest.mark.slow
def test_a_node_is_replaced_and_then_all_leave(stored, tmp_path):
    """A fresh node has its rank's state from the memory of another.

    SIGTERM to all: one of them stores the state before the workers that have it go, and the next
    start goes on from there. Four nodes import torch; a host that leaves waits for the next one.
    """
    keys = {"steps": 10, "checkpoints": stored.directory}
    more = {"hold": "4,8", "replicas": 1, "expected": 1}
    flags = "--nnodes=2 --nproc-per-node=1 --max-restarts=10"
    with job(tmp_path / "first", flags, KEPT, **keys, **more) as first:
        first.start()
        lost = first.start()
        holding(first, 4, ranks=2)
        lost.kill()
        poll_for(lambda: first.nodes[0].events("generation-over"), what="the end of their world")
        first.give("go-4")
        first.start()
        holding(first, 8, ranks=2)
        assert [line["step"] for line in latest(first, "start")] == [4, 4]
        has_expected_bits(first, 8)
        poll_for(lambda: steps_of(stored)[:1] == [6], what="the script's own checkpoint")
        left = [first.nodes[0], first.nodes[2]]
        for node in left:
            node.process.terminate()
        assert [node.wait(PATIENCE) for node in left] == [143, 143], first.said()
    assert steps_of(stored)[:2] == [8, 6]
    with job(tmp_path / "second", ONE_NODE, KEPT, **keys) as second:
        node = second.start()
        assert node.wait(PATIENCE) == 0, node.stderr
    for event, step in (("start", 8), ("end", 10)):
        found = [(line["step"], line["position"]) for line in second.lines(event=event)]
        assert found == [(step, step)] * 2, event


def test_worlds_shrink_and_grow_and_go_on_from_memory(stored, tmp_path):
    """A node is killed, another one joins, and leaves again. Three nodes import torch.

    What the one that leaves has stored is void or not: either way nobody needs it.
    """
    flags = "--nnodes=1:2 --nproc-per-node=1 --settle=60"
    keys = {"steps": 10, "hold": "4,6,8", "checkpoints": stored.directory}
    with job(tmp_path / "job", flags, KEPT, **keys) as one:

        def goes_on(step: int, ranks: int) -> None:
            holding(one, step, ranks)
            begun = [(line["world_size"], line["step"]) for line in latest(one, "start")]
            assert begun == [(ranks, step)] * ranks, one.said()
            one.give(f"go-{step}")

        first = one.start()
        killed = one.start()
        holding(one, 4, ranks=2)
        killed.kill()
        goes_on(4, ranks=1)
        holding(one, 6, ranks=1)
        leaving = one.start()
        goes_on(6, ranks=2)
        holding(one, 8, ranks=2)
        leaving.process.terminate()
        assert leaving.wait(PATIENCE) == 143, one.said()
        goes_on(8, ranks=1)
        assert first.wait(PATIENCE) == 0, one.said()
    assert [end["step"] for end in one.lines(event="end")] == [10]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SOAK))
def test_kills_at_any_moment(seed, tmp_path):
    """Whoever is killed whenever: the same bits, and nobody goes back further than two steps.

    A rank that dies before it has kept a step that the others have takes older random numbers,
    and says so.
    """
    chance, steps = random.Random(seed), 60
    flags, keys = THREE_RANKS.replace("restarts=3", "restarts=6"), {"steps": steps, "pause": 0.02}
    with job(tmp_path / "job", flags, KEPT, expected=1, **keys) as one:
        node = one.start()
        for generation in range(6):
            workers = one.world(generation, 3, timeout=PATIENCE)
            begun = max(line["step"] for line in workers)
            wanted = begun + chance.randint(1, 6)
            poll_for(
                lambda g=generation, n=wanted: reached(one, g) >= n,
                what=f"step {wanted}",
                timeout=PATIENCE,
            )
            time.sleep(chance.uniform(0, 0.03))  # not a wait: where in the step it strikes
            before = reached(one, generation)
            os.kill(chance.choice(workers)["pid"], signal.SIGKILL)
            after = one.world(generation + 1, 3, timeout=PATIENCE)
            assert len({line["step"] for line in after}) == 1
            assert after[0]["step"] >= before - 2
        assert node.wait(PATIENCE) == 0, node.stderr
    if "have no random states of step" not in node.stderr:
        has_expected_bits(one, steps, ranks=3)


def reached(made: Job, generation: int) -> int:
    """The furthest step that a rank has committed in a generation."""
    lines = made.lines(event="step", generation=generation)
    return max((line["step"] for line in lines), default=0)


@pytest.mark.slow
def test_the_example_uses_every_sample_once(tmp_path, monkeypatch):
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=snapshot.copy,rank=0,step=7")
    with job(tmp_path / "job", ONE_NODE) as one:
        words = ["--epochs=2", "--samples=500", f"--ledger={ledger}"]
        node = one.start(script=[str(EXAMPLE), *words])
        assert node.wait(PATIENCE) == 0, node.stderr
    assert "workers go on from step 6" in node.stdout
    assert main([str(ledger), "--samples=500", "--epochs=2"]) == 0
