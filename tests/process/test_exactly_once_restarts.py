"""All but one node, then all are killed at once, and started again: each sample is used once still.

The records and the ledgers of both starts are judged together, see `chaos_record`.
"""

from __future__ import annotations

import pytest

from tests.process.chaos_driver import Chaos, kill_all, started
from tests.process.chaos_record import MOST_REDONE, proven
from tests.process.jobs import job
from torchelastic.checkpoint import FileSystemCheckpointManager

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
def test_those_who_are_left_go_on_from_memory_and_if_none_is_from_the_checkpoint(tmp_path, mode):
    """One of three is no majority, so it is told that it may go on. All are killed in the middle of
    whatever they do: steps and a checkpoint under way. Five nodes import torch."""
    stored = FileSystemCheckpointManager(tmp_path / "checkpoints")
    keys = {"samples": SAMPLES, "checkpoints": stored.directory, "every": EVERY}
    flags = "--nnodes=2:3 --quorum=none --settle=0.2"
    with job(tmp_path / "first", flags) as made:
        first = started(made, mode, nodes=3, **keys)
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
    assert begins[after] >= gate - MOST_REDONE[mode], "from memory"

    latest = stored.list_checkpoints()[0].step
    furthest = max(line["step"] for line in first.record.of("used"))
    with job(tmp_path / "second", "--nnodes=1") as made:
        second = started(made, mode, nodes=1, workers=2, start=1, **keys)
        # As far as the first at least: what is done again is void.
        second.reach(max(furthest, latest) + 1, least=second.workers)
        second.finish()
    begins = first_steps(second)
    assert begins[min(begins)] == latest
    records, ledgers = [first.record, second.record], [first.ledger, second.ledger]
    wrong = proven(records, ledgers, samples=SAMPLES, mode="checkpoint")
    assert not wrong, second.told("\n".join(wrong))
