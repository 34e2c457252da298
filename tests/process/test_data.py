"""Samples under real agents: workers are killed and replaced, and each sample is used once."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.process.jobs import Job, job
from tests.support import poll_for
from torchelastic.data import checker

SCRIPT = Path(__file__).with_name("sampled.py")
SAMPLES, EPOCHS = 300, 2


def settled(made: Job) -> dict[int, int]:
    """For each step the generation that finished it last: what that one did is what counts."""
    found: dict[int, int] = {}
    for line in made.lines(event="finished"):
        found[line["step"]] = max(line["generation"], found.get(line["step"], -1))
    return found


def used(made: Job) -> dict[int, Counter]:
    """How often each sample was taken in settled steps, by epoch, in the test's own record."""
    taken = defaultdict(Counter)
    generation = settled(made)
    for line in made.lines(event="took"):
        if line["generation"] == generation.get(line["step"]):
            taken[line["epoch"]].update(line["samples"])
    return taken


def victim(made: Job, *, rank: int, after: int, size: int = 3) -> dict:
    """The last line of a rank in a world of so many, some steps after another."""

    def seen() -> dict | None:
        found = [
            line
            for line in made.lines(event="finished", rank=rank)
            if line["step"] >= after and worlds(made).get(line["generation"]) == size
        ]
        return found[-1] if found else None

    return poll_for(seen, what=f"rank {rank} at step {after}", timeout=60)


def worlds(made: Job) -> dict[int, int]:
    return {line["generation"]: line["size"] for line in made.lines(event="took")}


@pytest.mark.parametrize(
    ("stream", "workers"),
    [
        pytest.param(0, 1, id="sampler"),
        pytest.param(1, 1, id="stream", marks=pytest.mark.slow),
        pytest.param(1, 0, id="stream-without-processes", marks=pytest.mark.slow),
    ],
)
def test_with_workers_killed_and_replaced_each_sample_is_used_once(tmp_path, stream, workers):
    with job(tmp_path, "--nnodes=1 --nproc-per-node=3", script=SCRIPT) as made:
        keys = {"samples": SAMPLES, "epochs": EPOCHS, "stream": stream, "workers": workers}
        keys["full"] = 3
        script = [str(SCRIPT), str(made._lines), str(made._orders), str(tmp_path / "ledger")]
        node = made.start(script=[*script, *(f"{key}={value}" for key, value in keys.items())])
        step = 3
        for rank in (1, 0):
            found = victim(made, rank=rank, after=step)
            os.kill(found["pid"], signal.SIGKILL)
            step = found["step"] + 3
        assert node.wait(90) == 0, made.said()
        once = Counter(range(SAMPLES))
        assert used(made) == {epoch: once for epoch in range(EPOCHS)}
        assert set(worlds(made).values()) > {3}, "no step was taken by those who were left"
        weights = {str(line["weights"]) for line in made.lines(event="finished", step=step)}
        assert len(weights) == 1
        ends = {line["state"]["epoch"] for line in made.lines(event="done")}
        assert ends == {EPOCHS - 1}
    command = [str(tmp_path / "ledger"), "--epochs", str(EPOCHS)]
    shards = [min(13, SAMPLES - begin) for begin in range(0, SAMPLES, 13)]
    flag = ["--shards", ",".join(map(str, shards))] if stream else ["--samples", str(SAMPLES)]
    assert checker.main([*command, *flag]) == 0
