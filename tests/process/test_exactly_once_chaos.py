"""Nothing is lost and nothing used twice, whatever is killed, frozen, leaves and joins.

A schedule of faults made from a seed (`chaos_schedule`) is done to a real job (`chaos_driver`),
whose workers keep a record of their own (`chaos_worker`). Afterwards the ledger, that record and
the parameters of the model must all say that each sample was used once an epoch (`chaos_record`).
A failure names the seed and the faults.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.process.chaos_driver import Chaos, Member, kill_all, started
from tests.process.chaos_record import MOST_REDONE, proven
from tests.process.chaos_schedule import KINDS, NODES, Fault, schedule
from tests.process.jobs import job
from tests.support import SOAK
from torchelastic.checkpoint import FileSystemCheckpointManager

SAMPLES = 96
#: Workers are started hundreds of times: what all of them import is imported once a node.
PRELOAD = "torchelastic.data,torchelastic.p2p,torchelastic.training.torch_state"
FLAGS = f"--settle=0.2 --progress-timeout=4 --preload={PRELOAD}"
#: What a single node can do, which has to import torch but once.
FEW = {"kill": 4, "kill-entering": 1}
#: Some of each.
SOME = {kind: 1 for kind in KINDS} | {"kill": 6, "join": 2}


#: Ways to shard a model over a replica of so many workers, and what more a step may have.
FSDP = {"replica": 2, "mesh": "shard:2"}
FSDP_AND_TENSOR = {"replica": 4, "mesh": "shard:2,tensor:2"}
WAYS = ({}, {"micro": 2}, {"recompute": 1}, {"frozen": 1}, {"whole": 1}, {"micro": 3, "whole": 1})


def run(
    directory, mode: str, kinds: dict[str, int], *, nodes: int = NODES, seed: int = 1, **more: Any
) -> None:
    least = 1 if mode == "sharded" else 2
    flags = f"{FLAGS} --nnodes={f'{least}:4' if nodes > 1 else 1}"
    if mode == "sharded":  # where two are left, or the others are held out, either may be lost
        flags += f" --witness={directory / 'witness'}"
    with job(directory / "job", flags) as made:
        chaos = started(made, mode, nodes=nodes, samples=SAMPLES, **more)
        try:
            for fault in schedule(seed, mode, kinds, nodes):
                chaos.strike(fault)
            chaos.finish()
            wrong = proven([chaos.record], [chaos.ledger], samples=SAMPLES, mode=mode)
            assert not wrong, chaos.told("\n".join(wrong))
        except AssertionError as error:
            raise AssertionError(f"mode {mode}, seed {seed}: {error}") from None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["script", "train"])
def test_a_few_faults(tmp_path, mode):
    """To three workers, each with a loading process; all are replaced several times."""
    run(tmp_path, mode, FEW, nodes=1, workers=3, loaders=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_leaves_finishes_the_agreed_step_when_the_others_are_ahead(tmp_path):
    """Nobody waits for it after the last collective that they share. Two nodes import torch."""
    with job(tmp_path / "job", "--settle=60 --nnodes=1:2") as made:
        chaos = started(made, "train", nodes=2, workers=1, samples=SAMPLES)
        world = chaos.reach(4, least=2)  # both have entered step 4: it is the last one
        stays, leaves = sorted(chaos.members, key=lambda one: rank_of(one, world))
        leaves.node.process.terminate()
        generation = world[0]["generation"] + 1
        chaos.wait_for(
            lambda: generation in {w["generation"] for w in stays.node.events("world-formed")},
            "the next world",
        )
        chaos.members.remove(leaves)
        pid = chaos.claimed("fault", Fault(0, 4, "freeze", 1), "stop@place=optimizer.inside")
        chaos.reach(6, least=1)
        assert {5} == {line["step"] for line in chaos.record.of("done") if line["size"] == 1}
        os.kill(pid, signal.SIGCONT)
        assert leaves.node.wait() == 143, chaos.told("it has not left")
        (*_, last) = [line for line in chaos.record.of("done") if line["pid"] == pid]
        assert (last["step"], last["generation"]) == (4, generation - 1)
        chaos.finish()
        wrong = proven([chaos.record], [chaos.ledger], samples=SAMPLES, mode="train")
        assert not wrong, chaos.told("\n".join(wrong))


def rank_of(member: Member, world: list[dict[str, Any]]) -> int:
    return next(line["rank"] for line in world if line["node"] == member.number)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["script", "train"])
def test_faults_of_every_kind(tmp_path, mode):
    run(tmp_path, mode, SOME)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 1 + SOAK))
@pytest.mark.parametrize("mode", ["script", "train"])
def test_fifty_faults(tmp_path, mode, seed):
    run(tmp_path, mode, KINDS, seed=seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_to_sharded_replicas(tmp_path):
    run(tmp_path, "sharded", SOME, **FSDP, micro=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 1 + SOAK))
@pytest.mark.parametrize(
    ("shape", "nodes"), [(FSDP, 4), (FSDP_AND_TENSOR, 2)], ids=["4x2", "2x(2x2)"]
)
def test_fifty_faults_to_sharded_replicas(tmp_path, shape, nodes, seed):
    kinds = dict(KINDS)
    if nodes < 3:  # two killed at once may be all that is left of a part
        kinds["kill"] += kinds.pop("kill-entering")
    run(tmp_path, "sharded", kinds, nodes=nodes, seed=seed, **shape, **WAYS[seed % len(WAYS)])


# --- all but one node, then all, are killed at once and started again ----------------------------

#: Steps from one checkpoint to the next.
EVERY = 4


def first_steps(chaos: Chaos) -> dict[int, int]:
    """Where each generation began."""
    begins: dict[int, int] = {}
    for line in chaos.record.of("used"):
        known = begins.get(line["generation"], line["step"])
        begins[line["generation"]] = min(line["step"], known)
    return begins


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_those_who_are_left_go_on_from_memory_and_if_none_is_from_the_checkpoint(tmp_path):
    """One of three is no majority, so it is told that it may go on. All are killed in the middle of
    whatever they do: steps and a checkpoint under way. Five nodes import torch."""
    stored = FileSystemCheckpointManager(tmp_path / "checkpoints")
    keys = {"samples": SAMPLES, "checkpoints": stored.directory, "every": EVERY}
    flags = "--nnodes=2:3 --quorum=none --settle=0.2"
    with job(tmp_path / "first", flags) as made:
        first = started(made, "train", nodes=3, **keys)
        (before, *_) = first.reach(7, least=first.workers)
        lost, first.members = first.members[1:], first.members[:1]
        kill_all([member.node for member in lost])
        first.join()
        gate = first.gate
        first.open(gate + 60)
        first.wait_for(
            lambda: max(first_steps(first)) > before["generation"], "the next generation"
        )
        first.wait_for(
            lambda: stored.list_checkpoints()[0].step > gate + EVERY, "checkpoints of its own"
        )
        kill_all([member.node for member in first.members])
    begins = first_steps(first)
    after = min(generation for generation in begins if generation > before["generation"])
    assert begins[after] >= gate - MOST_REDONE["train"], "from memory"

    latest = stored.list_checkpoints()[0].step
    furthest = max(line["step"] for line in first.record.of("used"))
    with job(tmp_path / "second", "--nnodes=1") as made:
        second = started(made, "train", nodes=1, workers=2, start=1, **keys)
        # As far as the first at least: what is done again is void.
        second.reach(max(furthest, latest) + 1, least=second.workers)
        second.finish()
    begins = first_steps(second)
    assert begins[min(begins)] == latest
    records, ledgers = [first.record, second.record], [first.ledger, second.ledger]
    wrong = proven(records, ledgers, samples=SAMPLES, mode="checkpoint")
    assert not wrong, second.told("\n".join(wrong))
