"""Frameworks with our Keep: a worker is killed, they go on from memory, and nothing is different.

The scripts beside this file, `kept_*.py`, say on every rank where they go on and how they end: with
a digest of the model, its buffers, the optimizer and the random state. One has 6 steps in an epoch
with two ranks, 12 with one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.frameworks.test_frameworks import Case, by_script, param, printed, story
from tests.process.jobs import Job, Node, job
from tests.support import poll_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIGHTNING = Case("kept_lightning.py", (), "lightning")
TRANSFORMERS = Case("kept_transformers.py", (), "transformers.trainer")
ACCELERATE = Case("kept_accelerate.py", (), "accelerate")
#: Five batches in an epoch, two to a step, and one left over.
ACCUMULATED = ("--accumulate=2", "--samples=80")
#: On slow machines most of it is the import of a framework, three times.
PATIENCE = 100.0
GOES_ON = r"\[rank (\d)\] goes on from step (\d+)\n"
ENDS = r"\[rank (\d)\] ends at step (\d+) epoch (\d+) with (\w+)\n"


@dataclass(frozen=True)
class Kill:
    """A worker, killed when so many steps are done; the arguments of the script."""

    case: Case
    rank: int
    step: int
    arguments: tuple[str, ...] = ()
    workers: int = 2

    def __str__(self) -> str:
        words = [self.case.script, f"{self.rank}:{self.step}", *self.arguments]
        return " ".join([*words, *(["alone"] if self.workers == 1 else [])])


VALIDATING = ("--die-in=validation",)
MAX_STEPS = ("--max-steps=8", *ACCUMULATED)

KILLS = [
    Kill(LIGHTNING, rank=1, step=8),
    Kill(LIGHTNING, rank=0, step=6),
    Kill(LIGHTNING, rank=1, step=6, arguments=VALIDATING),
    Kill(LIGHTNING, rank=1, step=4, arguments=MAX_STEPS),
    Kill(LIGHTNING, rank=0, step=3, arguments=MAX_STEPS),
    Kill(LIGHTNING, rank=1, step=9, arguments=("--checkpoints",)),
    Kill(LIGHTNING, rank=1, step=9, arguments=("--stream",)),
    Kill(LIGHTNING, rank=1, step=9, arguments=("--loader-workers=1",)),
    Kill(LIGHTNING, rank=0, step=15, workers=1),
    Kill(TRANSFORMERS, rank=1, step=8),
    Kill(TRANSFORMERS, rank=0, step=6),
    Kill(TRANSFORMERS, rank=1, step=4, arguments=ACCUMULATED),
    Kill(TRANSFORMERS, rank=0, step=15, workers=1),
    Kill(ACCELERATE, rank=1, step=8),
    Kill(ACCELERATE, rank=0, step=6, arguments=VALIDATING),
    Kill(ACCELERATE, rank=1, step=4, arguments=ACCUMULATED),
    Kill(ACCELERATE, rank=0, step=15, workers=1),
]

_undisturbed: dict[tuple[object, ...], list[tuple[str, ...]]] = {}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", [param(kill, kill.case) for kill in KILLS])
def test_a_killed_worker_costs_the_step_in_flight_and_nothing_else(tmp_path, kill):
    expected = undisturbed(tmp_path, kill)
    node = run(tmp_path / "killed", kill, f"--die={kill.rank}:{kill.step}")
    failures = [record["failure"] for record in node.events("worker-failed")]
    assert (kill.rank, -signal.SIGKILL) in [(one["rank"], one["exitcode"]) for one in failures]
    begun = said(node, 1, GOES_ON)
    assert [rank for rank, _ in begun] == [str(rank) for rank in range(kill.workers)]
    # What the others were still writing when they were stopped may be lost with the step.
    steps = {int(step) for _, step in begun}
    assert steps in ({kill.step}, {kill.step - 1})
    assert said(node, 1, ENDS) == expected


def undisturbed(tmp_path: Path, kill: Kill) -> list[tuple[str, ...]]:
    """How the ranks end where nobody is killed."""
    key = kill.case, kill.arguments, kill.workers
    if key not in _undisturbed:
        node = run(tmp_path / "undisturbed", kill)
        _undisturbed[key] = said(node, 0, ENDS)
        assert len(_undisturbed[key]) == kill.workers
    return _undisturbed[key]


def run(directory: Path, kill: Kill, *more: str) -> Node:
    with job(directory, f"--standalone --nproc-per-node={kill.workers} --redirects=3") as it:
        node = it.start(
            f"--preload={kill.case.preload}", script=script(kill.case, it, *kill.arguments, *more)
        )
        assert node.wait(PATIENCE) == 0, story(node)
    return node


def script(case: Case, it: Job, *arguments: str) -> list[str]:
    out = (f"--out={it.directory / 'out'}",) if case is not ACCELERATE else ()
    return [str(HERE / case.script), *out, *arguments]


def said(node: Node, generation: int, pattern: str) -> list[tuple[str, ...]]:
    """What the ranks of a generation have said, by rank."""
    texts = (printed(node, generation, rank) for rank in (0, 1))
    return sorted(found for text in texts for found in re.findall(pattern, text))


@pytest.mark.timeout(300)
@by_script(LIGHTNING, ACCELERATE)
def test_a_smaller_world_goes_on_with_the_samples_that_are_left(tmp_path, case):
    """Two ranks have done n batches each: one rank goes on at its batch 2n."""
    with job(tmp_path, "--nnodes=1:2 --nproc-per-node=1 --redirects=3 --settle=5") as it:
        words = script(case, it, "--pace=0.3")
        first, second = (it.start(f"--preload={case.preload}", script=words) for _ in range(2))
        wait_until(it, first, lambda: "validates after step 6\n" in everything(first))
        second.kill()
        assert first.wait(PATIENCE) == 0, story(first)
    generation = max(record["generation"] for record in first.events("world-formed"))
    ((_, begun),) = said(first, generation, GOES_ON)
    ((_, end, epochs, _),) = said(first, generation, ENDS)
    alone = int(end) - int(begun)
    assert 5 <= int(begun) < 18  # step 6 is not committed yet when its validation begins
    assert (2 * int(begun) + alone, epochs) == (3 * 12, "3")


def everything(node: Node) -> str:
    return "".join(printed(node, 0, rank) for rank in (0, 1))


def wait_until(it: Job, node: Node, condition: Callable[[], bool]) -> None:
    poll_for(
        lambda: condition() or node.process.poll() is not None, what="a step", timeout=PATIENCE
    )
    assert node.process.poll() is None, it.said()
