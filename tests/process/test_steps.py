"""A real plain script, with no line of ours in it: its steps are known."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.process.jobs import HERE, job, status
from tests.support import poll_for

SCRIPT = HERE / "plain.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flag", "workers"), [("", 2), pytest.param("--no-zygote", 1, marks=pytest.mark.slow)]
)
def test_steps_rate_and_goodput_of_a_plain_script_that_is_killed(
    tmp_path, monkeypatch, flag, workers
):
    """Its zygote imports torch; with the flag each worker does, after it has begun."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    flags = f"--nnodes=1 --nproc-per-node={workers} --rdzv-id=plain --max-restarts=1 {flag}"
    with job(tmp_path / "job", flags, script=SCRIPT) as made:
        checkpoint = tmp_path / "checkpoint.pt"
        node = made.start(script=[str(SCRIPT), str(checkpoint)])

        def stepped(generation: int) -> list[dict]:
            told = [one for one in node.events("progress") if one["generation"] == generation]
            return told if len(told) > 2 and checkpoint.exists() else []

        seen = poll_for(lambda: stepped(0), what="steps", timeout=200)
        assert (seen[-1]["ranks"], seen[-1]["before"]) == ([*range(workers)], 0)
        pids = node.events("workers-started")[0]["pids"]
        os.kill(pids[-1], signal.SIGKILL)
        again = poll_for(lambda: stepped(1), what="steps after the kill", timeout=200)
        loaded = {one["before"] for one in again}
        assert len(loaded) == 1
        assert loaded.pop() % 10 == 0, "the state of the optimizer that was loaded"
        shown = status("plain")
        (tmp_path / "finish").touch()
        assert node.wait(200) == 0, made.said()
    assert shown["step"] >= max(again[0]["steps"])
    assert shown["rate"] > 0
    assert [rank["step"] is not None for rank in shown["ranks"]] == [True] * workers
    assert shown["recoveries"][0]["redo"] is not None
    found = shown["goodput"]
    assert found["steps_known"]
    assert found["redone_known"]
    assert 0 < found["ratio"] < 1
    assert found["parts"]["unknown"] == 0
    assert "goodput unknown" not in node.stderr


# --- the cost: no system call, and next to no time -----------------------------------------------

#: Of a worker, in each step: what it waited for, its collectives, what it reports, where it is; and
#: what torch calls in a step of a plain script.
#: `benchmarks/observe.py` has each of them apart, and whole trainings with and without.
STEPS = """
import gc, os, time
from torchelastic import metrics
from torchelastic.worker_counters import stalls
from torchelastic.metrics import reporting
from torchelastic.metrics.metric_table import MetricTable
from torchelastic.worker import status_page
from torchelastic.worker.backward_waits import BackwardWaits
from torchelastic.worker.optimizer_steps import Counter

shown = status_page.StatusPage(status_page.create())
shown.rank = 0
shown.collectives.enter(0)
mark = (shown.collectives.row_of("0"), 7, b"ALLREDUCE")
reporting._table, reporting._connected = MetricTable(), True  # as if an agent had been handed it

counter, optimizer = Counter(), object()
counter._status_page, counter._waits, counter._counted = shown, BackwardWaits(()), id(optimizer)

def step(number):
    counter._waits._ready(optimizer)
    counter._before_write(optimizer, (), {})
    counter.stepped(optimizer, (), {})
    stalls.add("data", 0.001)
    with stalls.Counted("snapshot"):
        pass
    for order in (2 * number, 2 * number + 1):
        shown.collectives.launched(order, *mark)
        shown.collectives.waits(*mark)
        stalls.add(stalls.PEERS, 0.001)
        shown.collectives.goes_on()
    metrics.put_metric("loss", 0.5)
    metrics.put_metric("accuracy", 0.25)
    shown.entered(0, number)

def nanoseconds():
    began = time.thread_time()
    for number in range(COUNT):
        step(number)
    return (time.thread_time() - began) * 1e9 / COUNT

nanoseconds()
gc.disable()
os.write(1, b"begin\\n")
took = [nanoseconds() for _ in range(20)]
os.write(1, b"end\\n")
os.write(1, b"%d ns\\n" % min(took))
"""
#: Python asks for memory now and then, and asks how much time a thread has had.
HARMLESS = {"brk", "mmap", "munmap", "madvise", "clock_gettime"}


def program(count: int) -> list[str]:
    return [sys.executable, "-c", STEPS.replace("COUNT", str(count))]


@pytest.mark.needs("strace")
def test_a_step_makes_no_system_call(tmp_path):
    output = tmp_path / "calls"
    traced = subprocess.run(
        ["strace", "-o", str(output), *program(50)], capture_output=True, text=True, timeout=60
    )
    assert traced.returncode == 0, traced.stderr
    lines = output.read_text().splitlines()
    ends = [number for number, line in enumerate(lines) if re.search(r'"(begin|end)', line)]
    between = {line.partition("(")[0] for line in lines[ends[0] + 1 : ends[1]]}
    assert between <= HARMLESS
    assert len(lines[ends[0] + 1 : ends[1]]) < 200, "nor one of these in each of a thousand steps"


@pytest.mark.alone
@pytest.mark.slow
def test_a_step_takes_no_more_than_a_few_microseconds():
    """It measures time, after others have ended."""
    ran = subprocess.run(program(250), capture_output=True, text=True, timeout=60, check=True)
    # The best of many: a busy machine makes every instruction take longer, not this code.
    [nanoseconds] = re.findall(r"(\d+) ns", ran.stdout)
    assert int(nanoseconds) < 20_000
