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


GPT = Case("train_gpt.py", BY_STEPS)
FRAMEWORKS = [
    Case("train_lightning.py", BY_EPOCHS, "lightning"),
    Case("train_accelerate.py", BY_STEPS, "accelerate"),
    Case("train_transformers.py", BY_STEPS, "transformers.trainer"),
]


def param(value: Any, case: Case) -> Any:
    """A value of a parameter, for tests that need the framework of a case."""
    package = case.preload.partition(".")[0]
    marks = [pytest.mark.needs(package)] if package else []
    return pytest.param(value, marks=marks, id=case.script if value is case else str(value))


def by_script(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [param(case, case) for case in cases])


@by_script(GPT, *FRAMEWORKS)
def test_a_killed_worker_costs_the_steps_since_the_checkpoint(tmp_path, monkeypatch, case):
    lose_a_worker(tmp_path, monkeypatch, case, victim=0)


@by_script(*FRAMEWORKS)
def test_the_same_with_the_framework_preloaded(tmp_path, monkeypatch, case):
    """Nothing they import starts a thread or computes: workers are forked with them in memory."""
    node = lose_a_worker(tmp_path, monkeypatch, case, victim=1, flags=f"--preload={case.preload}")
    assert node.events("zygote-ready")
    assert not node.events("zygote-unavailable")


def lose_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, *, victim: int, flags: str = ""
) -> Node:
    """Run a script, kill a worker after the first checkpoint, check all there is to see."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = [str(HERE / case.script), f"--out={tmp_path / 'out'}", *case.arguments, PACE]
    with job(tmp_path, "--standalone --nproc-per-node=2 --redirects=3") as it:
        node = it.start(flags, script=script)
        # The step after the checkpoint needs all ranks, so by then each has saved its part.
        poll_for(
            lambda: SAVE_EVERY + 1 in losses(node, 0) or node.process.poll() is not None,
            what=f"step {SAVE_EVERY + 1}",
            timeout=60,
        )
        assert node.process.poll() is None, story(node)
        os.kill(worker_pid(node, victim), signal.SIGKILL)
        assert node.wait(60) == 0, story(node)

    failures = [record["failure"] for record in node.events("worker-failed")]
    assert (victim, -signal.SIGKILL) in [(item["rank"], item["exitcode"]) for item in failures]
    assert {record["generation"] for record in node.events("world-formed")} == {0, 1}
    for rank in (0, 1):
        assert f"[rank {rank}] resumed at step {SAVE_EVERY}\n" in printed(node, 1, rank)
    before, after = losses(node, 0), losses(node, 1)
    assert list(after) == list(range(SAVE_EVERY + 1, STEPS + 1))
    redone = before.keys() & after.keys()
    assert redone
    assert {step: before[step] for step in redone} == {step: after[step] for step in redone}
    assert f"finished at step {STEPS}\n" in printed(node, 1, 0)
    return node


@by_script(GPT, *FRAMEWORKS)
def test_the_scripts_know_nothing_of_us(case):
    assert "torchelastic" not in (HERE / case.script).read_text()


def test_a_script_does_the_same_under_torchrun_and_as_one_process(tmp_path):
    """The same losses, step by step, from the two launchers; and it needs neither."""
    script = [str(HERE / "train_gpt.py"), "--steps=10", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    theirs = output([*torchrun, *script, str(tmp_path / "theirs")])
    with job(tmp_path / "job", "--standalone --nproc-per-node=2") as it:
        node = it.start(script=[*script, str(tmp_path / "ours")])
        assert node.wait(60) == 0, story(node)
    assert steps(node.stdout) == steps(theirs)
    assert list(steps(theirs)) == list(range(1, 11))
    assert "finished at step 10\n" in output([sys.executable, *script, str(tmp_path / "alone")])


def output(command: list[str]) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(node: Node, generation: int, rank: int, stream: str = "stdout") -> str:
    """What a worker of a generation wrote; nothing if there is none yet."""
    paths = node.directory.glob(f"logs/*/attempt_{generation}/{rank}/{stream}.log")
    return "".join(path.read_text() for path in paths)


def losses(node: Node, generation: int) -> dict[int, str]:
    return steps(printed(node, generation, rank=0))


def steps(text: str) -> dict[int, str]:
    """Step -> loss, as rank 0 printed them."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)\n", text)}


def worker_pid(node: Node, rank: int) -> int:
    """Of the first generation."""
    started = node.events("workers-started")[0]
    return started["pids"][started["ranks"].index(rank)]


def story(node: Node) -> str:
    """What one needs to see why a job has failed."""
    parts = [node.stderr, node.stdout]
    for path in sorted(node.directory.glob("logs/*/attempt_*/*/std*.log")):
        parts.append(f"--- {path.relative_to(node.directory)}\n{path.read_text()[-2000:]}")
    return "\n".join(parts)
