"""Run + keep with sharded state: a node is lost with its shards, and a world of another size has
every bit of them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import HERE, Job, job
from tests.support import poll_for
from torchelastic.agent.watch.hang_watchdog import is_frozen
from torchelastic.checkpoint import CheckpointStore

SCRIPT = HERE / "kept_sharded.py"
PATIENCE = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def together(made: Job, event: str, ranks: int, **wanted: object) -> tuple[int, str]:
    """Wait until all ranks of a world of this size have said this: of which step, and its bits."""

    def found() -> list[dict[str, Any]]:
        lines = made.lines(event=event, world_size=ranks, **wanted)
        return lines if len(lines) == ranks else []

    lines = made.wait_for(found, f"{ranks} ranks: {event} {wanted}", PATIENCE)
    (seen,) = {(line["step"], line["fingerprint"]) for line in lines}
    return seen


def test_a_lost_node_loses_nothing(tmp_path):
    """From 3 ranks to 2, to 4 with hybrid sharding, and to 2: three nodes import torch.

    The node that is left has its own shards and copies of the other's: all of them.
    """
    with job(tmp_path / "job", "--nnodes=1:2 --settle=60", SCRIPT) as one:
        keys = {"steps": 7, "hold": "3,5", "mesh": "2d"}
        left = one.start("--nproc-per-node=2", **keys)
        lost = one.start("--nproc-per-node=1", **keys)
        state = together(one, "holding", 3, step=3)
        lost.kill()
        assert together(one, "start", 2, step=3) == state, one.said()
        one.give("go-3")
        state = together(one, "holding", 2, step=5)
        lost = one.start("--nproc-per-node=2", **keys)
        assert together(one, "start", 4, step=5) == state, one.said()
        assert together(one, "holding", 4, step=5) == state
        generation = one.lines(event="holding", world_size=4)[0]["generation"]
        lost.kill()
        one.give("go-5")
        assert together(one, "start", 2, generation=generation + 1) == state, one.said()
        assert left.wait(PATIENCE) == 0, left.stderr


def test_a_state_moves_between_meshes(tmp_path):
    """FSDP2 over tensor parallelism, 2 x 2; then FSDP2 alone on 2 ranks; 2 x 2 again; and 1 x 2.
    Three nodes import torch. Nothing is in storage."""
    with job(tmp_path / "job", "--nnodes=1:2 --settle=60 --nproc-per-node=2", SCRIPT) as one:
        keys = {"steps": 7, "hold": "3,5", "mesh": "tp"}
        left = one.start(**keys)
        lost = one.start(**keys)
        state = together(one, "holding", 4, step=3)
        one.give("no-tp")
        lost.kill()
        assert together(one, "start", 2, step=3) == state, one.said()
        one.give("go-3")
        state = together(one, "holding", 2, step=5)
        (one.orders / "no-tp").unlink()
        lost = one.start(**keys)
        assert together(one, "start", 4, step=5) == state, one.said()
        assert together(one, "holding", 4, step=5) == state
        generation = one.lines(event="holding", world_size=4, step=5)[0]["generation"]
        lost.kill()
        one.give("go-5")
        assert together(one, "start", 2, generation=generation + 1) == state, one.said()
        assert left.wait(PATIENCE) == 0, left.stderr
        seen = {(line["world_size"], *line["placements"]) for line in one.lines(event="start")}
        strided = ("_StridedShard", "Shard")
        assert seen >= {(4, *strided), (2, "Shard"), (2, *strided)}


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_node_that_leaves_takes_no_shards_with_it(replicas, tmp_path):
    """The other goes on with the last step that was committed, from memory alone: it has copies of
    the shards, or fetches them before the other node leaves."""
    flags = f"--nnodes=1:2 --nproc-per-node=1 --settle=60 --snapshot-replicas={replicas}"
    with job(tmp_path / "job", flags, SCRIPT) as one:
        keys = {"steps": 100_000}
        left = one.start(**keys)
        leaves = one.start(**keys)
        poll_for(lambda: one.lines(step=5, world_size=2), what="some steps", timeout=PATIENCE)
        leaves.process.terminate()
        assert leaves.wait(PATIENCE) == 143, one.said()
        state = together(one, "start", 1)
        assert state[0] == max(line["step"] for line in one.lines(event="step", world_size=2))
        assert {line["fingerprint"] for line in one.lines(event="step", step=state[0])} >= {
            state[1]
        }
        left.process.terminate()
        assert left.wait(PATIENCE) == 143, one.said()


def test_all_nodes_that_leave_store_their_shards(tmp_path):
    """Two nodes, told at the same time, whether a checkpoint was due or not."""
    path, flags = tmp_path / "checkpoints", "--nnodes=2 --nproc-per-node=1 --shutdown-timeout=50"
    with job(tmp_path / "job", flags, SCRIPT) as one:
        keys = {"steps": 100_000, "checkpoints": path, "every": 1000}
        nodes = [one.start(**keys) for _ in range(2)]
        poll_for(lambda: one.lines(step=5, world_size=2), what="some steps", timeout=PATIENCE)
        for node in nodes:
            node.process.terminate()
        assert [node.wait(PATIENCE) for node in nodes] == [143, 143], one.said()
        done = max(line["step"] for line in one.lines(event="step"))
    assert stored(path) == [done], "no step that was done is lost"


def stored(path: Path) -> list[int | None]:
    return [found.step for found in CheckpointStore(path).list_checkpoints()]


def test_workers_are_killed_then_all_then_all_leave(tmp_path, monkeypatch):
    """One after the other, three nodes, which import torch.

    1. Whoever is killed whenever, all go on from one step that was committed, with its bits. A rank
       that is killed while it writes costs one checkpoint: the others have their shards in memory.
    2. The node is lost while a rank writes its part: the checkpoint before is taken, by more ranks.
    3. Before these leave, they store their shards, whether a checkpoint was due or not: one rank
       alone goes on from there.
    """
    path, chance, end = tmp_path / "checkpoints", random.Random(7), 40
    kill = "kill@place=checkpoint.write,rank=1,step=4"
    stop = f"stop@place=checkpoint.write,rank=1,step={end},generation=3"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", f"{kill};{stop}")
    with job(tmp_path / "first", "--nnodes=1 --nproc-per-node=2 --max-restarts=3", SCRIPT) as one:
        node = one.start(steps=end + 2, checkpoints=path, kept=4)
        for generation in range(1, 4):
            step, bits = together(one, "start", 2, generation=generation)
            before = one.lines(event="step", step=step)
            assert {line["fingerprint"] for line in before} == {bits}
            if generation == 1:
                assert step in (3, 4)
            if generation == 3:
                break
            wanted = step + chance.randint(3, 8)
            poll_for(
                lambda n=wanted: one.lines(event="step", step=n), what=f"{wanted}", timeout=PATIENCE
            )
            time.sleep(chance.uniform(0, 0.03))  # not a wait: where in the step it strikes
            workers = one.lines(event="start", generation=generation)
            os.kill(chance.choice(workers)["pid"], signal.SIGKILL)
        (writing,) = one.lines(event="start", generation=3, rank=1)
        poll_for(lambda: is_frozen(writing["pid"]), what="the writer is stopped", timeout=PATIENCE)
        node.kill()
    latest = stored(path)[0]
    assert latest == end - 2
    bits = {line["step"]: line["fingerprint"] for line in one.lines(event="step")}
    monkeypatch.delenv("TORCHELASTIC_FAULTS")

    flags = "--nnodes=1 --nproc-per-node=3 --shutdown-timeout=50"
    with job(tmp_path / "second", flags, SCRIPT) as other:
        node = other.start(steps=100_000, checkpoints=path)
        assert together(other, "start", 3) == (latest, bits[latest])
        poll_for(lambda: other.lines(step=latest + 5), what="some steps", timeout=PATIENCE)
        node.process.terminate()
        assert node.wait(PATIENCE) == 143, other.said()
        bits = {line["step"]: line["fingerprint"] for line in other.lines(event="step")}
    assert list(path.glob(".new-*")) == [], "what the killed one has left is cleared"
    latest = stored(path)[0]
    assert latest == max(bits), "no step that was done is lost"

    with job(tmp_path / "third", "--nnodes=1 --nproc-per-node=1 --max-restarts=0", SCRIPT) as third:
        node = third.start(steps=latest + 1, checkpoints=path)
        assert together(third, "start", 1) == (latest, bits[latest])
        assert node.wait(PATIENCE) == 0, node.stderr
