"""Sharded models in `torchelastic.train`: the same bits as torch alone, with whom it may."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.process.jobs import HERE, Job, Node, job
from tests.support import poll_for
from torchelastic.data import checker

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13"),
]


def command(script: str, workers: int, flags: str, *args: str) -> list[str]:
    words = [sys.executable, "-m", "torchelastic", "run", "--standalone", *flags.split()]
    return [*words, "--nproc-per-node", str(workers), str(HERE / script), *args]


def environ(faults: str = "") -> dict[str, str]:
    return {**os.environ, "TORCHELASTIC_FAULTS": faults}


def run(
    script: str, directory: Path, workers: int, *args: str, flags: str = "", faults: str = ""
) -> str:
    done = subprocess.run(
        command(script, workers, flags or "--max-restarts 0", *args),
        cwd=directory,
        env=environ(faults),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def places(directory: Path) -> list[str]:
    """Directories for the lines, orders and ledger of `sharded.py`."""
    lines, orders, ledger = (directory / name for name in ("lines", "orders", "ledger"))
    for one in (lines, orders):
        one.mkdir(parents=True)
    return [str(lines), str(orders), f"ledger={ledger}"]


def lines(directory: Path, **wanted: Any) -> list[dict[str, Any]]:
    texts = [text for path in directory.iterdir() for text in path.read_text().split("\n")[:-1]]
    return [line for line in map(json.loads, texts) if wanted.items() <= line.items()]


def bits(directory: Path, **wanted: Any) -> dict[tuple[int, int], str]:
    """The bits of each rank's shards after each step."""
    return {(line["step"], line["rank"]): line["hash"] for line in lines(directory, **wanted)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "keys"),
    [
        pytest.param(4, "micro=2 clip= plain= recompute=", id="accumulated"),
        pytest.param(8, "layout=both size=4 clip= reshard=0", id="fsdp-tensor"),
        pytest.param(4, "mixed=bf16 frozen=", id="bf16"),
        pytest.param(4, "mixed=fp16 scaled=", id="fp16"),
        pytest.param(6, "batch=12 twice=", id="three-replicas"),
    ],
)
def test_the_bits_are_those_of_native_hsdp_on_a_fixed_mesh(tmp_path, workers, keys):
    words = [*keys.split(), "steps=3"]
    run("native_hsdp.py", tmp_path, workers, *places(tmp_path / "native"), *words)
    run("sharded.py", tmp_path, workers, *places(tmp_path), *words)
    expected = bits(tmp_path / "native/lines")
    assert len(expected) == 3 * workers
    assert bits(tmp_path / "lines", event="step") == expected


#: A world that waits until all of its workers are there.
FIXED = "--world-sizes 4 --progress-timeout 20"


def test_with_a_fixed_size_the_result_is_that_of_an_undisturbed_run(tmp_path):
    """Killed in a forward, in a backward and before its end; and a step whose last all-reduce
    fails on the worker that has one part of the model, when the others have committed it: it
    completes the step, and sends that part to the replacement of the other one. Old and new
    workers of a replica write checkpoints together."""
    keys = ["steps=12", "schedule=", "counted=", "beside="]
    run("sharded.py", tmp_path, 4, *places(tmp_path / "calm"), *keys)
    kills = (
        "kill@rank=3,step=2,place=collective.before,n=3",
        "kill@rank=0,step=4,place=collective.launched,n=10,generation=1",
        "kill@rank=2,step=6,place=joint.before,generation=2",
    )
    rough = tmp_path / "rough"
    words = [*places(rough), *keys, "due=5"]
    run("sharded.py", tmp_path, 4, *words, flags=FIXED, faults=";".join(kills))
    expected = bits(tmp_path / "calm/lines", event="step")
    assert len(expected) == 48
    found = bits(rough / "lines", event="step")
    assert found.items() <= expected.items()
    # A rank that was still in the last all-reduce of the step before a kill completes that step in
    # the next world, where nothing is written down.
    assert {step for step, _ in expected.keys() - found.keys()} <= {1, 3, 5}

    late = tmp_path / "late"
    kill = "kill@rank=3,step=5,place=joint.after"
    run("sharded.py", tmp_path, 4, *places(late), *keys, "late=5:1", flags=FIXED, faults=kill)
    found = bits(late / "lines", event="step")
    assert lines(late / "lines", event="step", generation=1), "nothing was late"
    # Completed in the next world, where nothing is written down. The end of this one may have
    # reached other ranks in the same all-reduce; if all, the step was taken again.
    completed = {key for key in expected if key not in found}
    assert completed < {(5, rank) for rank in range(4)}
    assert found | {key: expected[key] for key in completed} == expected


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["twice=", "hold=3"])
def test_a_step_is_completed_whatever_it_wrote(tmp_path, keys):
    """With copies, because of two optimizers; and without a write, by its gradients."""
    run("sharded.py", tmp_path, 4, *places(tmp_path / "calm"), "steps=12", keys)
    late = [*places(tmp_path / "late"), "steps=12", keys, "late=4:1,3"]
    run("sharded.py", tmp_path, 4, *late, flags=FIXED)
    expected = bits(tmp_path / "calm/lines", event="step")
    found = bits(tmp_path / "late/lines", event="step")
    assert lines(tmp_path / "late/lines", event="step", generation=1), "nothing was late"
    missed = {key: expected[key] for key in expected if key not in found}
    assert found | missed == expected
    # The end of this world may have reached the others in the same all-reduce, too.
    assert missed.keys() < {(4, rank) for rank in range(4)}


@pytest.mark.parametrize("keys", [["dropout="], ["twice=", "schedule="]])
def test_bad_step_is_skipped_also_by_a_worker_interrupted_in_its_last_all_reduce(tmp_path, keys):
    """Rank 1 learns the verdict from the others. Starts two jobs: about 15 s."""
    keys = [*keys, "steps=10", "guard="]
    run("sharded.py", tmp_path, 4, *places(tmp_path / "calm"), *keys, "known=4")
    late = [*places(tmp_path / "late"), *keys, "bad=2:4", "late=4:1"]
    run("sharded.py", tmp_path, 4, *late, flags=FIXED)
    assert lines(tmp_path / "late/lines", event="took", generation=1), "nothing was late"
    expected, found = (
        {(line["step"], line["hash"]) for line in lines(tmp_path / name / "lines", event="done")}
        for name in ("calm", "late")
    )
    assert found == expected


def kept(directory: Path, size: int) -> int:
    """The step of the newest snapshot that all workers have reported; -1 if there is none."""
    last = {line["rank"]: line["step"] for line in lines(directory, event="kept")}
    return min(last.values()) if len(last) == size else -1


def test_a_part_that_no_worker_has_comes_from_memory(tmp_path):
    """One replica; its snapshots are copied behind the training, where tensors are large. The
    survivor and the replacement agree when a checkpoint is due."""
    keys = ["steps=20", "large=100001", "dropout="]
    run("sharded.py", tmp_path, 2, *places(tmp_path / "calm"), *keys)
    words = [*places(tmp_path), *keys, "first=0.2", "due=auto"]
    job = subprocess.Popen(
        command("sharded.py", 2, "--max-restarts 3", *words),
        cwd=tmp_path,
        env=environ(),
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        found = tmp_path / "lines"
        poll_for(lambda: kept(found, 2) > 2, what="snapshots of two workers", timeout=100)
        newest = kept(found, 2)
        os.kill(lines(found, event="step", rank=1)[0]["pid"], signal.SIGKILL)
        _, said = job.communicate(timeout=100)
    assert job.returncode == 0, said
    again = min(line["step"] for line in lines(found, event="step", generation=1))
    assert again >= newest
    assert f"continues from step {again}, from snapshots in memory: no worker has part 1" in said
    expected = bits(tmp_path / "calm/lines", event="step")
    assert bits(found, event="step", generation=1) == {
        key: value for key, value in expected.items() if key[0] >= again
    }
    assert bits(found, event="step", generation=0).items() <= expected.items()
    assert checker.main([str(tmp_path / "ledger"), "--samples", "160"]) == 0


#: Snapshots fail.
FORGETFUL = "raise@place=snapshot.copy,generation=any"


@pytest.mark.slow
def test_a_part_that_no_worker_has_comes_from_the_checkpoint(tmp_path):
    said = run(
        "sharded.py",
        tmp_path,
        2,
        *places(tmp_path),
        "steps=12",
        "every=4",
        "stored",
        flags="--max-restarts 3",
        faults=f"kill@rank=1,step=6,place=collective.before,n=3;{FORGETFUL}",
    )
    assert "no whole replica: " in said
    assert "from the checkpoint of step 4: no worker has part 1 of the state at step 6" in said
    again = lines(tmp_path / "lines", event="step", generation=1)
    assert min(line["step"] for line in again) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ([], "step=6,place=collective.before,n=3"),
        (["every=4"], "place=checkpoint.write"),  # rank 0 waits for its part
    ],
    ids=["none", "incomplete"],
)
def test_without_a_checkpoint_a_lost_part_means_to_begin_again(tmp_path, keys, where):
    faults = f"kill@rank=1,{where};{FORGETFUL}"
    words = [*places(tmp_path), "steps=12", *keys]
    said = run("sharded.py", tmp_path, 2, *words, flags="--max-restarts 3", faults=faults)
    assert "this worker is replaced, and training begins at step 0" in said
    found = lines(tmp_path / "lines", event="step")
    last = max(line["generation"] for line in found)
    assert {line["step"] for line in found if line["generation"] == last} == set(range(12))


@pytest.mark.slow
def test_a_replica_that_leaves_stores_its_state(tmp_path):
    words = [*places(tmp_path), "steps=4000", "every=100000", "slow=0.02"]
    job = subprocess.Popen(command("sharded.py", 2, "", *words), cwd=tmp_path, env=environ())
    try:
        poll_for(lambda: lines(tmp_path / "lines", event="step"), what="a step", timeout=100)
    finally:
        job.terminate()
        code = job.wait(60)
    assert code == 143
    last = max(line["step"] for line in lines(tmp_path / "lines", event="step"))
    (stored,) = (tmp_path / "orders/checkpoints").glob("*step*")
    assert f"-step{last + 1}-" in stored.name


# --- replicas that span nodes --------------------------------------------------------------------

SHARDED = HERE / "sharded.py"
KEYS = {"steps": 100_000, "slow": 0.05}
PATIENCE = 120.0


def node_of(made: Job, generation: int, rank: int) -> Node:
    """The node whose agent has this worker."""
    pid = made.lines(event="step", generation=generation, rank=rank)[0]["pid"]
    (parent,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    living = (node for node in made.nodes if node.process.poll() is None)
    return next(node for node in living if node.agent_pid == int(parent))


def by_coordinate(lines: list[dict[str, Any]]) -> dict[tuple[int, int, int], set[str]]:
    """The bits of the shards after each step, by generation, step and coordinate."""
    found: dict[tuple[int, int, int], set[str]] = {}
    for line in lines:
        key = (line["generation"], line["step"], line["rank"] % 2)
        found.setdefault(key, set()).add(line["hash"])
    return found


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_spare_completes_a_replica_and_broken_ones_are_combined(tmp_path):
    flags = "--nnodes=1:4 --nproc-per-node=1 --replica-size=2 --settle=60 --lease=10"
    with job(tmp_path / "job", flags, SHARDED, ledger=tmp_path / "ledger", **KEYS) as made:
        for _ in range(5):
            made.start()
        first = made.wait_steps(3, size=4, timeout=PATIENCE)
        node_of(made, first, rank=1).kill()
        again = made.wait_steps(3, size=4, after=first, timeout=PATIENCE)
        host = made.nodes[0]
        others = (node_of(made, again, rank) for rank in (0, 2))
        next(node for node in others if node is not host).kill()
        last = made.wait_steps(3, size=2, after=again, timeout=PATIENCE)
        formed = {one["generation"]: one["replica"] for one in host.events("world-formed")}
        assert [formed[generation] for generation in (first, again, last)] == [2, 2, 2]
        lines = made.lines(event="step")
    coordinates: dict[int, set[int]] = {}
    for line in lines:
        coordinates.setdefault(line["pid"], set()).add(line["rank"] % 2)
    assert all(len(found) == 1 for found in coordinates.values()), coordinates
    assert all(len(bits) == 1 for bits in by_coordinate(lines).values()), "replicas are equal"
