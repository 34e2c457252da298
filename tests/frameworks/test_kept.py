"""Frameworks with our Keep: workers are killed, they go on from memory, and nothing is different.

The scripts beside this file, `kept_*.py`, say on every rank where they go on and how they end: with
a digest of the model, its buffers, the optimizer and the random state. One has 6 steps in an epoch
with two ranks, 12 with one; 3 with `ACCUMULATED`.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frameworks.test_frameworks import Case, by_script, param, printed, story
from tests.process.jobs import Job, Node, job
from tests.support import poll_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
LIGHTNING = Case("kept_lightning.py", (), "lightning")
TRANSFORMERS = Case("kept_transformers.py", (), "transformers.trainer")
ACCELERATE = Case("kept_accelerate.py", (), "accelerate")
#: Five batches in an epoch, two to a step, and one left over.
ACCUMULATED = "--accumulate=2 --samples=80"
PATIENCE = 200.0
GOES_ON = r"\[rank (\d)\] goes on from step (\d+)\n"
ENDS = r"\[rank (\d)\] ends at step (\d+) epoch (\d+) with (\w+)\n"
WITHOUT = ENDS.replace("ends", "without Keep ends")


@dataclass(frozen=True)
class Kills:
    """Workers that are killed, one in each life: `RANK:STEP`, when so many steps are done."""

    case: Case
    kills: str
    arguments: str = ""
    workers: int = 2

    def __str__(self) -> str:
        return f"{self.case.script} {self.arguments} {self.workers} workers".replace("  ", " ")


KILLS = [
    Kills(LIGHTNING, "1:6:validation 0:6 1:8", "--checkpoints"),
    Kills(LIGHTNING, "0:3 1:4", f"--max-steps=8 --stream {ACCUMULATED}"),
    Kills(LIGHTNING, "0:15", "--loader-workers=1", workers=1),
    Kills(TRANSFORMERS, "0:3 1:4", ACCUMULATED),
    Kills(ACCELERATE, "0:3:validation 1:4", ACCUMULATED),
    Kills(LIGHTNING, "1:6:validation 0:8", "--fsdp=2"),
    Kills(ACCELERATE, "0:3 1:4", f"--fsdp=2 {ACCUMULATED}"),
    Kills(TRANSFORMERS, "0:3 1:4", f"--fsdp=2 {ACCUMULATED}"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for one worker the agent does not set it


@pytest.mark.parametrize("given", [param(one, one.case) for one in KILLS])
def test_a_killed_worker_costs_the_step_in_flight_and_nothing_else(tmp_path, given):
    """In an epoch, between two and in a validation. Imports a framework, in the zygote.

    The measure is how the same script ends without Keep. Nothing frameworks import starts a thread
    or computes, so workers are forked with them in memory.
    """
    kills = given.kills.split()
    with job(tmp_path, f"--standalone --nproc-per-node={given.workers} --redirects=3") as it:
        words = script(given.case, it, *given.arguments.split(), "--die", *kills)
        node = it.start(f"--preload={given.case.preload}", script=words)
        assert node.wait(PATIENCE) == 0, story(node)
    assert node.events("zygote-ready")
    assert not node.events("zygote-unavailable")
    failures = [record["failure"] for record in node.events("worker-failed")]
    killed = [one["rank"] for one in failures if one["exitcode"] == -signal.SIGKILL]
    assert killed == [int(kill.split(":")[0]) for kill in kills]
    for life, kill in enumerate(kills, start=1):
        step = int(kill.split(":")[1])
        if given.case is LIGHTNING and kill.endswith("validation"):
            step -= 1  # the last one of an epoch is committed after its validation
        begun = said(node, life, GOES_ON)
        assert [rank for rank, _ in begun] == [str(rank) for rank in range(given.workers)], kill
        # What the others were still writing when they were stopped may be lost with the step.
        assert {int(begin) for _, begin in begun} in ({step}, {step - 1}), kill
    ends = said(node, len(kills), ENDS)
    assert len(ends) == given.workers
    assert ends == said(node, 0, WITHOUT)


def script(case: Case, it: Job, *arguments: str) -> list[str]:
    return [str(HERE / case.script), f"--out={it.directory / 'out'}", *arguments]


def said(node: Node, generation: int, pattern: str) -> list[tuple[str, ...]]:
    """The lines of a generation's ranks, by rank."""
    texts = (printed(node, generation, rank) for rank in (0, 1))
    return sorted(found for text in texts for found in re.findall(pattern, text))


@by_script(LIGHTNING, ACCELERATE)
def test_a_smaller_world_goes_on_with_the_samples_that_are_left(tmp_path, case):
    """Two ranks have done n batches each: one goes on at its batch 2n. Two nodes import it all."""
    with job(tmp_path, "--nnodes=1:2 --nproc-per-node=1 --redirects=3 --settle=60") as it:
        words = script(case, it, "--pace=0.3")
        first, second = (it.start(f"--preload={case.preload}", script=words) for _ in range(2))
        poll_for(
            lambda: (
                "validates after step 6\n" in printed(first, 0, 0) + printed(first, 0, 1)
                or first.process.poll() is not None
            ),
            what="the end of the first epoch",
            timeout=PATIENCE,
        )
        assert first.process.poll() is None, story(first)
        second.kill()
        assert first.wait(PATIENCE) == 0, story(first)
    generation = max(record["generation"] for record in first.events("world-formed"))
    ((_, begun),) = said(first, generation, GOES_ON)
    ((_, end, epochs, _),) = said(first, generation, ENDS)
    alone = int(end) - int(begun)
    assert 5 <= int(begun) < 18  # step 6 is not committed yet when its validation begins
    assert (2 * int(begun) + alone, epochs) == (3 * 12, "3")
