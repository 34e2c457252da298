"""A worker killed at every place of a step, one after the other: each sample is used once.

Between its last collective and its commit a worker has used its samples and left no line of it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.process.jobs import job
from tests.process.test_data import used
from torchelastic.data import checker
from torchelastic.data.verdict import check

SCRIPT = Path(__file__).with_name("sampled.py")
SAMPLES, EPOCHS = 120, 2

PLACES = (
    "step.begin",
    "collective.before",
    "collective.launched",
    "collective.after",
    "optimizer.before",
    "optimizer.after",
    "step.end",
)


def faults(rank: int) -> str:
    """One in each generation; the world waits for the replacement, and is the next generation."""
    return ";".join(
        f"kill@rank={rank},step={3 * number + 2},place={place},generation={number}"
        for number, place in enumerate(PLACES)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_anywhere_in_a_step_each_sample_is_used_once(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("TORCHELASTIC_FAULTS", faults(rank))
    with job(tmp_path, "--nnodes=1 --nproc-per-node=2 --world-sizes=2", script=SCRIPT) as made:
        script = [str(SCRIPT), str(made._lines), str(made._orders), str(tmp_path / "ledger")]
        node = made.start(script=[*script, f"samples={SAMPLES}", f"epochs={EPOCHS}", "workers=0"])
        assert node.wait(90) == 0, made.said()
        killed = [event for event in node.events("worker-exited") if event["exitcode"] == -9]
        assert len(killed) == len(PLACES), made.said()
        once = Counter(range(SAMPLES))
        assert used(made) == {epoch: once for epoch in range(EPOCHS)}
    found = checker.read([tmp_path / "ledger"])
    verdict = check(found.lines, expected=range(SAMPLES), epochs=EPOCHS, lost=found.lost)
    assert verdict.ok, str(verdict)
    # Others have committed what it was killed in, at the last places at least.
    assert sum(epoch.unwitnessed for epoch in verdict.epochs) > 0, str(verdict)
