"""Run + keep: plain scripts whose workers and nodes are killed go on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.process.jobs import Job, job
from tests.support import poll_for
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.data.checker import main

SCRIPT = Path(__file__).with_name("kept.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "keep.py"
STEPS = 12
#: One restart only: a job that gets further each time has it again.
ONE_NODE = "--nnodes=1 --nproc-per-node=2 --max-restarts=1"
TWO_NODES = "--nnodes=2 --nproc-per-node=1 --max-restarts=10"
PATIENCE = 90.0


def script(made: Job, **keys: object) -> list[str]:
    words = [f"{name}={value}" for name, value in {"steps": STEPS, **keys}.items()]
    return [str(SCRIPT), str(made.directory / "lines"), str(made.directory / "orders"), *words]


def go(made: Job) -> None:
    (made.directory / "orders" / "go").touch()


def holding(made: Job, ranks: int) -> None:
    """Wait until all ranks of a world of this size wait for `go`."""
    poll_for(
        lambda: len(made.lines(event="holding", world_size=ranks)) == ranks,
        what=f"{ranks} ranks that wait",
        timeout=PATIENCE,
    )


def starts(made: Job, generation: int) -> list[int]:
    """Where the ranks of a generation went on from."""
    return [line["step"] for line in made.lines(event="start", generation=generation)]


def ends(made: Job) -> list[tuple[int, int, str]]:
    found = sorted(made.lines(event="end"), key=lambda line: line["rank"])
    return [(line["step"], line["position"], line["fingerprint"]) for line in found]


_uninterrupted: list[tuple[int, int, str]] = []


@pytest.fixture
def expected(tmp_path):
    """How the ranks end where nobody is killed."""
    if not _uninterrupted:
        with job(tmp_path / "uninterrupted", ONE_NODE) as one:
            node = one.start(script=script(one))
            assert node.wait(PATIENCE) == 0, node.stderr
        _uninterrupted.extend(ends(one))
    return list(_uninterrupted)


def run_with(fault: str, directory: Path, monkeypatch) -> Job:
    monkeypatch.setenv("TORCHELASTIC_FAULTS", fault)
    with job(directory, ONE_NODE) as one:
        node = one.start(script=script(one))
        assert node.wait(PATIENCE) == 0, node.stderr
    return one


def test_a_worker_killed_in_a_step_loses_that_step_at_most(expected, tmp_path, monkeypatch):
    """Whether step 5 was sealed when rank 1 died in step 6 depends on who was quicker."""
    one = run_with("kill@place=step.begin,rank=1,step=5", tmp_path / "job", monkeypatch)
    begun = starts(one, 1)
    assert len(begun) == 2
    assert set(begun) in ({5}, {4})
    assert ends(one) == expected
    assert expected[0][:2] == (STEPS, STEPS)


@pytest.mark.parametrize("place", ["snapshot.copy", "snapshot.sealing,n=2"])
def test_a_worker_killed_while_it_writes_leaves_the_snapshot_before(
    place, expected, tmp_path, monkeypatch
):
    one = run_with(f"kill@rank=0,step=5,place={place}", tmp_path / "job", monkeypatch)
    assert starts(one, 1) == [4, 4]
    assert ends(one) == expected


def test_kill_after_kill(expected, tmp_path, monkeypatch):
    """In the first step of a generation too, where the base is all there is."""
    kills = [
        "kill@place=step.begin,rank=0,step=2,generation=0",
        "kill@place=snapshot.begun,n=2,rank=0,step=4,generation=1",
        "kill@place=snapshot.begun,n=1,rank=1,step=7,generation=2",
        "kill@place=snapshot.skeleton,n=2,rank=0,step=8,generation=3",
    ]
    one = run_with(";".join(kills), tmp_path / "job", monkeypatch)
    assert starts(one, 2) == [3, 3]
    assert ends(one) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_moment(seed, tmp_path):
    """Whoever is killed whenever: the same bits, and nobody goes back further than two steps."""
    chance, steps = random.Random(seed), 60
    with job(tmp_path / "uninterrupted", ONE_NODE) as one:
        assert one.start(script=script(one, steps=steps)).wait(PATIENCE) == 0
    expected = ends(one)
    with job(tmp_path / "job", ONE_NODE.replace("restarts=1", "restarts=6")) as one:
        node = one.start(script=script(one, steps=steps, pause=0.02))
        for generation in range(6):
            workers = one.world(generation, 2, timeout=PATIENCE)
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
            after = one.world(generation + 1, 2, timeout=PATIENCE)
            assert len({line["step"] for line in after}) == 1
            assert after[0]["step"] >= before - 2
        assert node.wait(PATIENCE) == 0, node.stderr
    assert ends(one) == expected


def reached(made: Job, generation: int) -> int:
    """The furthest step that a rank has committed in a generation."""
    lines = made.lines(event="step", generation=generation)
    return max((line["step"] for line in lines), default=0)


def test_a_fresh_node_fetches_from_the_memory_of_another(expected, tmp_path):
    with job(tmp_path / "job", TWO_NODES) as one:
        keys = {"hold": 6, "replicas": 1}
        one.start(script=script(one, **keys))
        second = one.start(script=script(one, **keys))
        holding(one, 2)
        second.kill()
        go(one)
        third = one.start(script=script(one, **keys))
        for node in (one.nodes[0], third):
            assert node.wait(PATIENCE) == 0, one.said()
    later = max(line["generation"] for line in one.lines(event="start"))
    assert starts(one, later) == [6, 6]
    assert ends(one) == expected


def test_a_smaller_world_goes_on_from_memory(tmp_path):
    """If the first node was quick it has begun alone: then a larger world did so, too."""
    with job(tmp_path / "job", "--nnodes=1:2 --nproc-per-node=1") as one:
        first = one.start(script=script(one, hold=6))
        second = one.start(script=script(one, hold=6))
        holding(one, 2)
        second.kill()
        go(one)
        assert first.wait(PATIENCE) == 0, one.said()
    last = max(one.lines(event="start"), key=lambda line: line["generation"])
    assert (last["world_size"], last["step"]) == (1, 6)
    assert [end[0] for end in ends(one)] == [STEPS]


def test_the_example_uses_every_sample_once(tmp_path, monkeypatch):
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@place=snapshot.copy,rank=0,step=7")
    with job(tmp_path / "job", ONE_NODE) as one:
        words = ["--epochs=2", "--samples=500", f"--ledger={ledger}"]
        node = one.start(script=[str(EXAMPLE), *words])
        assert node.wait(PATIENCE) == 0, node.stderr
    assert "workers go on from step 6" in node.stdout
    assert main([str(ledger), "--samples=500", "--epochs=2"]) == 0


def test_when_all_agents_are_gone_the_checkpoint_is_left(expected, tmp_path):
    stored = FileSystemCheckpointManager(tmp_path / "checkpoints")
    keys = {"checkpoints": stored.directory}
    with job(tmp_path / "first", ONE_NODE) as first:
        node = first.start(script=script(first, hold=8, **keys))
        holding(first, 2)
        poll_for(lambda: len(stored.list_checkpoints()) == 2, what="checkpoints of 3 and 6")
        node.kill()
    with job(tmp_path / "second", ONE_NODE) as second:
        node = second.start(script=script(second, **keys))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert starts(second, 0) == [6, 6]
    assert [end[:2] for end in ends(second)] == [end[:2] for end in expected]
