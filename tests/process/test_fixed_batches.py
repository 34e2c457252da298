"""Fixed micro-batches: the same weights, to the bit, at any size and whatever dies."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.process.jobs import HERE, Job, job
from torchelastic.data import checker
from torchelastic.data.verdict import check

SCRIPT = HERE / "fixed_batches.py"
PATIENCE = 120.0
#: Several buckets, so that some are sent during the last backward.
BUCKET = 3000

pytestmark = pytest.mark.timeout(400)


def start(made: Job, workers: int, **keys):
    ledger = made.directory / "ledger"
    return made.start(f"--nproc-per-node={workers}", ledger=ledger, **keys)


def digests(path: Path, workers: int, flags: str = "", **keys) -> tuple[set[str], Job]:
    """The hashes and losses that all workers have in the end."""
    with job(path, f"--nnodes=1 --max-restarts=20 {flags}", SCRIPT) as made:
        assert start(made, workers, **keys).wait(PATIENCE) == 0, made.said()
    ended = made.lines(event="done")
    assert len(ended) >= workers, "all ranks are compared"
    return {(line["digest"], line["loss"]) for line in ended}, made


def test_weights_of_train_are_those_of_one_worker_after_kills_at_many_places(tmp_path, monkeypatch):
    keys = {"bucket": BUCKET, "steps": 16}
    alone, _ = digests(tmp_path / "alone", 1, **keys)
    places = [
        "micro_batch.begin,n=2",
        "collective.before",
        "collective.launched,n=3",
        "optimizer.before",
        "step.end",
    ]
    kills = [
        f"kill@rank={number % 3},step={2 * number + 2},place={place},generation={number}"
        for number, place in enumerate(places)
    ]
    monkeypatch.setenv("TORCHELASTIC_FAULTS", ";".join(kills))
    killed, made = digests(tmp_path / "killed", 3, "--world-sizes=3", audit=0.5, **keys)
    ended = [event for event in made.nodes[0].events("worker-exited") if event["exitcode"] == -9]
    assert len(ended) >= len(kills), made.said()
    assert len(alone) == 1
    assert killed == alone
    found = checker.read([made.directory / "ledger"])
    verdict = check(found.lines, expected=set(range(150)), epochs=3, lost=found.lost)
    assert verdict.ok, str(verdict)


#: Of a replica: two workers that read different samples, or also split a layer.
SHARD, BOTH = {"shard": 2}, {"shard": 2, "tensor": 2}
sharded = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")


@sharded
def test_weights_of_replicas_are_those_of_one_replica_after_kills(tmp_path, monkeypatch):
    """Two jobs one after the other, whose zygotes import torch. One of two replicas is lost in a
    micro-batch, in a collective, and before the last all-reduce of a step; the partial step has a
    micro-batch with a sample for one worker only."""
    keys = {"bucket": BUCKET, "steps": 12, "samples": 149, **SHARD}
    alone, _ = digests(tmp_path / "alone", 2, **keys)
    kills = [
        "kill@rank=3,step=2,place=micro_batch.begin,n=2,generation=0",
        "kill@rank=0,step=5,place=collective.launched,n=20,generation=2",
        "kill@rank=2,step=9,place=joint.before,generation=4",
    ]
    monkeypatch.setenv("TORCHELASTIC_FAULTS", ";".join(kills))
    killed, made = digests(tmp_path / "killed", 4, "--world-sizes=2,4", **keys)
    ended = [event for event in made.nodes[0].events("worker-exited") if event["exitcode"] == -9]
    assert len(ended) >= len(kills), made.said()
    # A replica that comes back after the last step has not seen its loss.
    assert {digest for digest, _ in killed} == {digest for digest, _ in alone}
    found = checker.read([made.directory / "ledger"])
    verdict = check(found.lines, expected=set(range(149)), epochs=2, lost=found.lost)
    assert verdict.ok, str(verdict)


@sharded
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replica", "dtype", "replicas"),
    [(SHARD, "bf16", 3), ({"tensor": 2}, "fp32", 3), (BOTH, "fp32", 2)],
    ids=["three-replicas-bf16", "tensor", "both"],
)
def test_weights_do_not_depend_on_the_number_of_replicas(tmp_path, replica, dtype, replicas):
    keys = {"bucket": BUCKET, "steps": 8, "dtype": dtype, **replica}
    size = math.prod(replica.values())
    alone, _ = digests(tmp_path / "alone", size, **keys)
    assert len(alone) == 1
    assert digests(tmp_path / "several", size * replicas, loaders=1, **keys)[0] == alone


@pytest.mark.slow
def test_weights_of_keep_are_those_of_train_on_one_worker(tmp_path, monkeypatch):
    """Two jobs one after the other, whose zygotes import torch."""
    keys = {"bucket": BUCKET, "model": "conv"}
    alone, _ = digests(tmp_path / "alone", 1, **keys)
    monkeypatch.setenv(
        "TORCHELASTIC_FAULTS", "kill@rank=1,step=4,place=micro_batch.begin,generation=0"
    )
    kept, _ = digests(tmp_path / "kept", 3, mode="keep", **keys)
    assert kept == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "count"),
    [
        ("transformer", "bf16", 12),
        ("conv", "fp32", 16),
        ("lstm", "fp32", 8),
        ("gan", "fp32", 8),
    ],
)
def test_weights_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch, model, dtype, count):
    keys = {"model": model, "dtype": dtype, "count": count, "bucket": BUCKET}
    alone, _ = digests(tmp_path / "alone", 1, **keys)
    assert len(alone) == 1
    kills = "kill@rank=1,step=3,place=micro_batch.begin;kill@rank=0,step=6,place=collective.after"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", f"{kills},generation=2")
    for workers in (2, 5):
        assert digests(tmp_path / str(workers), workers, loaders=1, **keys)[0] == alone


def test_survivors_run_only_the_micro_batches_of_the_lost_worker(tmp_path, monkeypatch):
    """Four workers with four micro-batches each: one dies after it has run one of them."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@rank=2,step=3,place=micro_batch.begin,n=2")
    keys = {"count": 16, "steps": 5, "wait": 0.2, "samples": 64, "bucket": BUCKET}
    with job(tmp_path / "job", "--nnodes=1 --world-sizes=3,4", SCRIPT) as made:
        assert start(made, 4, **keys).wait(PATIENCE) == 0, made.said()
    ran = made.lines(event="ran", step=3)
    # 16, and the one that was lost with its worker.
    assert len(ran) == 17, made.said()


def test_error_in_the_last_backward_is_undone(tmp_path):
    """Buckets are on their way then. Starts two jobs: about 10 s."""
    keys = {"bucket": BUCKET}
    alone, _ = digests(tmp_path / "alone", 1, **keys)
    found, made = digests(tmp_path / "error", 3, wrong="1:4:raise", **keys)
    assert found == alone
    (told,) = made.lines(event="wrong")
    assert [line["pid"] for line in made.lines(event="done")].count(told["pid"]) == 1


def test_job_with_another_number_of_micro_batches_is_refused(tmp_path):
    """Each rank has another policy, as after a change of the script in a running job."""
    with job(tmp_path / "job", "--nnodes=1", SCRIPT) as made:
        start(made, 2, differs=1).wait(PATIENCE)
        assert "the batch policy" in made.said()


@pytest.mark.slow
def test_slow_worker_runs_fewer_micro_batches_and_the_weights_are_the_same(tmp_path):
    """Two jobs one after the other, whose zygotes import torch; micro-batches take their time."""
    keys = {"count": 14, "steps": 7, "wait": 0.1, "bucket": BUCKET, "measure": 4, "samples": 500}
    alone, _ = digests(tmp_path / "alone", 1, **{**keys, "wait": 0.0})
    found, made = digests(tmp_path / "slow", 2, slow="1", loaders=1, **keys)
    assert found == alone
    # Speeds are compared in step 3: before, each worker has 7 of 14.
    before, after = (
        sorted(Counter(line["pid"] for line in made.lines(event="ran", step=step)).values())
        for step in (2, 6)
    )
    assert before == [7, 7]
    assert after[0] < 7 < after[1]
