"""All, or all but one node, are killed at once and started again: each sample is used once still.

The records and the ledgers of both starts are judged together, see `chaos_record`.
"""

from __future__ import annotations

import pytest

from tests.process.chaos_driver import Chaos, kill_all, started
from tests.process.chaos_record import proven
from tests.process.jobs import job
from torchelastic.checkpoint import FileSystemCheckpointManager

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SAMPLES = 96
#: Steps from one checkpoint to the next.
EVERY = 4


def first_steps(chaos: Chaos) -> dict[int, int]:
    """Where each generation began."""
    begins: dict[int, int] = {}
    for line in chaos.record.of("used"):
        known = begins.get(line["generation"], line["step"])
        begins[line["generation"]] = min(line["step"], known)
    return begins


@pytest.mark.parametrize("mode", ["script", "train"])
def test_all_killed_at_once_go_on_from_the_checkpoint(tmp_path, mode):
    """In the middle of whatever they do: steps and a checkpoint under way."""
    stored = FileSystemCheckpointManager(tmp_path / "checkpoints")
    keys = {"samples": SAMPLES, "checkpoints": stored.directory, "every": EVERY}
    with job(tmp_path / "first", "--nnodes=2") as made:
        first = started(made, mode, nodes=2, **keys)
        first.open(60)
        first.wait_for(lambda: len(stored.list_checkpoints()) >= 2, "two checkpoints")
        kill_all(made.nodes)
    latest = stored.list_checkpoints()[0].step
    with job(tmp_path / "second", "--nnodes=2") as made:
        second = started(made, mode, nodes=2, start=1, **keys)
        second.reach(latest + 3, least=second.workers)
        second.finish()
    begins = first_steps(second)
    assert begins[min(begins)] == latest
    records, ledgers = [first.record, second.record], [first.ledger, second.ledger]
    wrong = proven(records, ledgers, samples=SAMPLES, mode="checkpoint")
    assert not wrong, second.told("\n".join(wrong))


@pytest.mark.parametrize("mode", ["script", "train"])
def test_all_but_one_killed_at_once_go_on_from_memory(tmp_path, mode):
    """There is no checkpoint. One of three is no majority, so it is told that it may go on."""
    flags = "--nnodes=3 --quorum=none"
    with job(tmp_path / "job", flags) as made:
        chaos = started(made, mode, samples=SAMPLES)
        (before, *_) = chaos.reach(7, least=chaos.workers)
        lost, chaos.members = chaos.members[1:], chaos.members[:1]
        kill_all([member.node for member in lost])
        for _ in lost:
            chaos.join()
        chaos.open(8)
        chaos.wait_for(
            lambda: max(first_steps(chaos)) > before["generation"], "the next generation"
        )
        chaos.finish()
        wrong = proven([chaos.record], [chaos.ledger], samples=SAMPLES, mode=mode)
        assert not wrong, chaos.told("\n".join(wrong))
