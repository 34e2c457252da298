"""Run + keep with sharded state: a node is lost with its shards, and a world of another size has
every bit of them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.process.jobs import Job, job
from tests.support import poll_for
from torchelastic.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("kept_sharded.py")
PATIENCE = 60.0
pytestmark = pytest.mark.slow


def script(made: Job, **keys: object) -> list[str]:
    words = [f"{name}={value}" for name, value in {"steps": 6, **keys}.items()]
    return [str(SCRIPT), str(made.directory / "lines"), str(made.directory / "orders"), *words]


def holding(made: Job, ranks: int) -> tuple[int, str]:
    """Wait until all ranks of a world of this size wait for `go`: at which step, which bits."""
    try:
        lines = poll_for(
            lambda: (
                (found := made.lines(event="holding", world_size=ranks))
                and len(found) == ranks
                and found
            ),
            what=f"{ranks} ranks that wait",
            timeout=PATIENCE,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{made.said()}") from None
    (seen,) = {(line["step"], line["fingerprint"]) for line in lines}
    return seen


def goes_on(made: Job, generation: int, ranks: int) -> tuple[int, str]:
    lines = made.world(generation, ranks, timeout=PATIENCE)
    (seen,) = {(line["step"], line["fingerprint"]) for line in lines}
    return seen


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [(1, 1, {}), (2, 1, {}), (1, 2, {}), (2, 2, {"mesh": "2d"})],
    ids=["2 to 1", "3 to 2", "3 to 1", "4 to 2, hybrid"],
)
def test_a_lost_node_loses_nothing(first, second, keys, tmp_path):
    """The node that is left has its own shards and copies of the other's: all of them."""
    with job(tmp_path / "job", "--nnodes=1:2") as one:
        left = one.start(f"--nproc-per-node={first}", script=script(one, hold=3, **keys))
        lost = one.start(f"--nproc-per-node={second}", script=script(one, hold=3, **keys))
        step, bits = holding(one, first + second)
        lost.kill()
        (one.directory / "orders" / "go").touch()
        generation = 1 + max(line["generation"] for line in one.lines(event="holding"))
        found = goes_on(one, generation, first)
        assert found == (step, bits), one.said()
        assert left.wait(PATIENCE) == 0, left.stderr


def test_workers_killed_at_any_moment(tmp_path):
    """All go on from one step that was committed, with its bits, and come to the end."""
    chance = random.Random(7)
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --max-restarts=3") as one:
        node = one.start(script=script(one, steps=40, tell=1))
        for generation in range(3):
            workers = one.world(generation, 2, timeout=PATIENCE)
            wanted = workers[0]["step"] + chance.randint(3, 8)
            poll_for(
                lambda n=wanted: one.lines(event="step", step=n),
                what=f"step {wanted}",
                timeout=PATIENCE,
            )
            time.sleep(chance.uniform(0, 0.03))  # not a wait: where in the step it strikes
            os.kill(chance.choice(workers)["pid"], signal.SIGKILL)
            step, bits = goes_on(one, generation + 1, 2)
            assert step > 0
            assert {line["fingerprint"] for line in one.lines(event="step", step=step)} == {bits}
        assert node.wait(PATIENCE) == 0, node.stderr


def stored(path: Path) -> list[int | None]:
    return [found.step for found in CheckpointStore(path).list_checkpoints()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_killed_while_it_writes_its_part_and_begun_anew_in_another_world(
    ranks, tmp_path, monkeypatch
):
    """No memory is left, and the checkpoint of step 4 lacks a part: that of step 2 is taken."""
    path = tmp_path / "checkpoints"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=checkpoint.write,rank=1,step=4")
    with job(tmp_path / "first", "--nnodes=1 --nproc-per-node=2 --max-restarts=0") as one:
        node = one.start(script=script(one, tell=1, checkpoints=path))
        assert node.wait(PATIENCE) != 0
        bits = {line["step"]: line["fingerprint"] for line in one.lines(event="step")}
    assert stored(path) == [2]
    monkeypatch.delenv("TORCHELASTIC_FAULTS")
    flags = f"--nnodes=1 --nproc-per-node={ranks} --max-restarts=0"
    with job(tmp_path / "second", flags) as other:
        node = other.start(script=script(other, tell=1, checkpoints=path))
        assert goes_on(other, 0, ranks) == (2, bits[2])
        assert node.wait(PATIENCE) == 0, node.stderr
    assert stored(path) == [6, 4, 2]
    assert list(path.glob(".new-*")) == [], "what the killed one has left is cleared"


def test_a_rank_that_is_killed_while_it_writes_costs_one_checkpoint(tmp_path, monkeypatch):
    """The others have their shards in memory, and the next generation stores them."""
    path = tmp_path / "checkpoints"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=checkpoint.write,rank=1,step=4")
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --max-restarts=1") as one:
        node = one.start(script=script(one, tell=1, checkpoints=path))
        assert node.wait(PATIENCE) == 0, node.stderr
        (begun,) = {line["step"] for line in one.lines(event="start", generation=1)}
    # Steps that are committed again are stored again.
    assert stored(path) == ([6, 2] if begun == 4 else [6, 4, 2])
    assert list(path.glob(".new-*")) == []


def test_before_the_only_node_leaves_its_shards_are_stored(tmp_path):
    """At the next commit, by all ranks together; a world of another size goes on from there."""
    path = tmp_path / "checkpoints"
    flags = "--nnodes=1 --nproc-per-node=2 --shutdown-timeout=50"
    with job(tmp_path / "first", flags) as one:
        node = one.start(script=script(one, steps=100_000, tell=1, checkpoints=path))
        poll_for(lambda: one.lines(event="step", step=3), what="step 3", timeout=PATIENCE)
        node.process.terminate()
        assert node.wait(PATIENCE) == 143, one.said()
        bits = {line["step"]: line["fingerprint"] for line in one.lines(event="step")}
    latest = stored(path)[0]
    assert latest == max(bits), "no step that was done is lost, whether one was due or not"
    with job(tmp_path / "second", "--nnodes=1 --nproc-per-node=1 --max-restarts=0") as other:
        node = other.start(script=script(other, steps=latest + 1, checkpoints=path))
        assert goes_on(other, 0, 1) == (latest, bits[latest])
        assert node.wait(PATIENCE) == 0, node.stderr
