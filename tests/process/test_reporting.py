"""What a script reports is seen by its job: real workers, with steps and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.jobs import Node, job
from tests.support import poll_for
from torchelastic.events.log import read
from torchelastic.events.view import JobView, fold

SCRIPT = Path(__file__).with_name("reporting.py")


def view_of(node: Node) -> JobView:
    paths = list((node.directory / "logs").rglob("events.jsonl"))
    return fold(read(paths[0])) if paths else JobView()


def values(view: JobView, name: str) -> list[float]:
    return [value for _, _, value in view.metrics.get(name, ())]


def test_a_plain_script_reports_from_generation_to_generation(tmp_path):
    flags = "--standalone --no-zygote --nproc-per-node=2 --max-restarts=1"
    with job(tmp_path, flags) as it:
        node = it.start(script=[str(SCRIPT), "script", str(it._orders)])
        poll_for(lambda: 10.0 in values(view_of(node), "loss"), what="the loss, live")
        (it._orders / "finish").touch()
        assert node.wait() == 0, node.stderr
        view = view_of(node)
        # Rank 1 may have been the only one to say something, before or after the other: of a
        # child, nothing is heard.
        assert set(values(view, "loss")) <= {0.0, 1.0, 10.0, 11.0}
        assert set(values(view, 'acc"ura\ncy')) == {0.5}
        assert {step for _, step, _ in view.metrics["loss"]} == {None}
        assert "only one has it" not in view.metrics, "it is not finite"
        told = [item for event in node.events("progress") for item in event["metrics"].items()]
        assert ("only one has it", None) in told


@pytest.mark.slow
def test_a_resident_worker_reports_with_its_steps(tmp_path):
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        node = it.start(script=[str(SCRIPT), "train", str(tmp_path / "store")])
        assert node.wait(100) == 0, node.stderr
        view = view_of(node)
        assert values(view, "step")[-1] == 2.0
        assert view.metrics["step"][-1][1] in (2, 3), "the step it was in, or the one after"
        assert values(view, "loss"), "tensors are numbers"
        assert set(values(view, "progress_rate")) & {7.0, 8.0}
        assert view.samples == 24
        assert view.checkpoint is not None
        assert (view.checkpoint.step, view.checkpoint.size > 0) == (3, True)


#: What a step that reports its loss does, in a worker whose agent is this very process.
STEPS = """
import os, time
from torchelastic.metrics import board, put_metric, reporting

reporting._board, reporting._connected = board.Board(), True
for number in range(100):
    put_metric("loss", number / 7)
os.write(1, b"begin\\n")
began = time.thread_time()
for number in range(COUNT):
    put_metric("loss", number / 7)
took = time.thread_time() - began
os.write(1, b"end\\n")
os.write(1, b"%d ns\\n" % (took * 1e9 / COUNT))
"""


def test_a_value_costs_a_few_microseconds(tmp_path):
    program = [sys.executable, "-c", STEPS.replace("COUNT", "5000")]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    [nanoseconds] = re.findall(r"(\d+) ns", ran.stdout)
    assert int(nanoseconds) < 20_000


@pytest.mark.needs("strace")
def test_a_value_makes_no_system_call(tmp_path):
    output = tmp_path / "calls"
    program = [sys.executable, "-c", STEPS.replace("COUNT", "300")]
    traced = subprocess.run(
        ["strace", "-o", str(output), *program], capture_output=True, text=True, timeout=60
    )
    assert traced.returncode == 0, traced.stderr
    lines = output.read_text().splitlines()
    ends = [number for number, line in enumerate(lines) if re.search(r'"(begin|end)', line)]
    between = {line.partition("(")[0] for line in lines[ends[0] + 1 : ends[1]]}
    assert between <= {"brk", "mmap", "munmap", "madvise", "clock_gettime"}
    assert ends[1] - ends[0] < 30, "nor one of these with every value"
