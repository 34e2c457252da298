"""Scripts written for torchrun, unchanged: a worker is killed, they go on from their checkpoints.

The scripts beside this file are what a user would write. Each prints `step N: loss L` on rank 0
and `[rank R] resumed at step N` on every rank, and saves after every 20 steps.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import Node, job
from tests.support import poll_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
STEPS, SAVE_EVERY = 60, 20
BY_STEPS = (f"--steps={STEPS}", f"--save-every={SAVE_EVERY}")
BY_EPOCHS = (f"--epochs={STEPS // SAVE_EVERY}",)  # the data is made so that one has 20 steps
#: Leaves two seconds from one checkpoint to the next: the kill must not fall into the second.
PACE = "--step-seconds=0.1"


@dataclass(frozen=True)
class Case:
    """A script, its arguments, and the module to preload: that of the framework it uses."""

    script: str
    arguments: tuple[str, ...]
    preload: str = ""


CASES = [
    Case("train_gpt.py", BY_STEPS),
    Case("train_accelerate.py", BY_STEPS),
    Case("train_lightning.py", BY_EPOCHS, "lightning"),
    Case("train_transformers.py", BY_STEPS, "transformers.trainer"),
]


def param(value: Any, case: Case) -> Any:
    """A value of a parameter, for tests that need the framework of a case."""
    package = case.preload.partition(".")[0]
    marks = [pytest.mark.needs(package)] if package else []
    return pytest.param(value, marks=marks, id=case.script if value is case else str(value))


def by_script(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [param(case, case) for case in cases])


@pytest.mark.timeout(300)
@by_script(*CASES)
def test_a_killed_worker_costs_the_steps_since_the_checkpoint(tmp_path, monkeypatch, case):
    """After the first checkpoint one rank is killed, after the second the other. Imports torch.

    With a framework preloaded and without; Accelerate is preloaded in `test_kept.py`.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = [str(HERE / case.script), f"--out={tmp_path / 'out'}", *case.arguments, PACE]
    assert "torchelastic" not in (HERE / case.script).read_text()
    with job(tmp_path, "--standalone --nproc-per-node=2 --redirects=3") as it:
        node = it.start(f"--preload={case.preload}" if case.preload else "", script=script)
        for victim in (0, 1):
            wait_for_step(node, victim, (victim + 1) * SAVE_EVERY + 1)
            os.kill(worker_pid(node, victim, generation=victim), signal.SIGKILL)
        assert node.wait(100) == 0, story(node)

    assert node.events("zygote-ready")
    assert not node.events("zygote-unavailable")
    failures = [record["failure"] for record in node.events("worker-failed")]
    assert [one["rank"] for one in failures if one["exitcode"] == -signal.SIGKILL] == [0, 1]
    assert {record["generation"] for record in node.events("world-formed")} == {0, 1, 2}
    for generation in (1, 2):
        saved = generation * SAVE_EVERY
        for rank in (0, 1):
            assert f"[rank {rank}] resumed at step {saved}\n" in printed(node, generation, rank)
        before, after = losses(node, generation - 1), losses(node, generation)
        redone = before.keys() & after.keys()
        assert min(redone) == min(after) == saved + 1
        assert {step: before[step] for step in redone} == {step: after[step] for step in redone}
    assert list(losses(node, 2)) == list(range(2 * SAVE_EVERY + 1, STEPS + 1))
    assert f"finished at step {STEPS}\n" in printed(node, 2, 0)
    if case is CASES[0]:
        all_losses = losses(node, 0) | losses(node, 1) | losses(node, 2)
        assert all_losses == under_torchrun(tmp_path, case), "torchrun has other losses"


def wait_for_step(node: Node, generation: int, step: int) -> None:
    """The step after a checkpoint needs all ranks, so by then each has saved its part."""
    poll_for(
        lambda: step in losses(node, generation) or node.process.poll() is not None,
        what=f"step {step}",
        timeout=100,
    )
    assert node.process.poll() is None, story(node)


def under_torchrun(tmp_path: Path, case: Case) -> dict[int, str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*torchrun, str(HERE / case.script), f"--out={tmp_path / 'theirs'}", *case.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return steps(done.stdout)


def printed(node: Node, generation: int, rank: int, stream: str = "stdout") -> str:
    """The lines that a worker of a generation wrote; empty if there are none yet."""
    paths = node.directory.glob(f"logs/*/attempt_{generation}/{rank}/{stream}.log")
    return "".join(path.read_text() for path in paths)


def losses(node: Node, generation: int) -> dict[int, str]:
    return steps(printed(node, generation, rank=0))


def steps(text: str) -> dict[int, str]:
    """Step -> loss, as rank 0 printed them."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)\n", text)}


def worker_pid(node: Node, rank: int, generation: int) -> int:
    started = node.events("workers-started")[generation]
    return started["pids"][started["ranks"].index(rank)]


def story(node: Node) -> str:
    """Everything needed to see why a job has failed."""
    parts = [node.stderr, node.stdout]
    for path in sorted(node.directory.glob("logs/*/attempt_*/*/std*.log")):
        parts.append(f"--- {path.relative_to(node.directory)}\n{path.read_text()[-2000:]}")
    return "\n".join(parts)
