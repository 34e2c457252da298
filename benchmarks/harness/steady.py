"""What a step costs while nothing fails: ours beside a bare DDP loop under the same launcher.

Judged by causes, which do not depend on what else the machine does: system calls of the training
thread, collectives, processor time of the training thread. Wall clock is reported beside them.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.contestants import MEMORY, WORKERS
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.launchers import OURS
from benchmarks.harness.processes import descendants

RESIDENT, BARE = "resident_train.py", "ddp_train.py"
#: One worker per core: with more, wall clock tells of the scheduler.
STEADY_WORKERS = min(WORKERS, os.cpu_count() or 1)
PATIENCE = 180.0
TRACE_SECONDS = 2.0
#: How strace shows the beginning of a line of the step log.
STEP_LINE = r'"{\"t\": '
#: System calls that wait for something else than a lock of the process.
BLOCKING = frozenset(
    {
        *("read", "readv", "pread64", "recvfrom", "recvmsg", "recvmmsg", "accept", "accept4"),
        *("connect", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait"),
        *("epoll_pwait2", "wait4", "waitid", "fsync", "fdatasync", "nanosleep", "flock", "msgrcv"),
        "clock_nanosleep",
    }
)


@dataclass(frozen=True)
class Cost:
    """A step of one job: medians over its steps and workers."""

    wall: float
    #: Processor time of the training thread.
    cpu: float
    collectives: float


@dataclass(frozen=True)
class Comparison:
    """Two scripts at a size of the model, `steps` long each time."""

    name: str
    first: str
    second: str
    size: str
    steps: int
    workers: int = STEADY_WORKERS
    arguments: tuple[str, ...] = ()


def compare(comparison: Comparison, pairs: int) -> Iterable[tuple[Cost, Cost]]:
    """Pairs of jobs, every other one in reverse order."""
    sides = (comparison.first, comparison.second)
    for number in range(pairs):
        order = sides if number % 2 == 0 else sides[::-1]
        costs = [run(script, comparison) for script in order]
        first, second = costs if number % 2 == 0 else costs[::-1]
        yield first, second


def run(script: str, comparison: Comparison) -> Cost:
    """One job to its end."""
    given = (f"--steps={comparison.steps}", *comparison.arguments)
    with make_job(script, comparison.size, *given, workers=comparison.workers) as job:
        wait_end(job, script)
        return cost([_step_lines(path) for path in _logs(job)])


def wait_end(job: Job, script: str) -> None:
    """Start a job of one node and wait until it has ended well."""
    node = job.start_node()
    job.wait_for(lambda: node.process.poll() is not None, PATIENCE)
    if node.process.poll() != 0:
        raise JobFailed(f"{script} did not end well\n{job.output()}")


def make_job(script: str, size: str, *arguments: str, workers: int = STEADY_WORKERS) -> Job:
    plain = (f"--size={size}", "--accelerator=0", "--checkpoint-every=0", *arguments)
    return Job(OURS, script, plain, workers=workers, elastic=False, parent=MEMORY)


def _logs(job: Job) -> list[Path]:
    return sorted((job.directory / "logs").glob("*.jsonl"))


def _step_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def cost(workers: Sequence[Sequence[dict[str, Any]]]) -> Cost:
    """From the lines of each worker's steps. The first fifth warms up and is not counted."""

    def median(name: str) -> float:
        gaps: list[float] = []
        for lines in workers:
            settled = lines[len(lines) // 5 :]
            gaps += [later[name] - earlier[name] for earlier, later in pairwise(settled)]
        return statistics.median(gaps)

    return Cost(median("t"), median("cpu"), median("collectives"))


@dataclass(frozen=True)
class Calls:
    """System calls of a training thread per step: the median of all, the mean of each kind."""

    total: float
    kinds: dict[str, float]

    def blocking(self) -> float:
        return sum(count for name, count in self.kinds.items() if name in BLOCKING)


def trace(script: str, size: str) -> Calls | None:
    """Watch the training thread of one worker for a while; None where strace cannot.

    A worker's script runs in its main thread, and so does the training: strace without `-f` sees
    that thread and no other.
    """
    with make_job(script, size) as job:
        job.start_node()
        job.wait_training(STEADY_WORKERS, quiet=1.0)
        worker = job.history.latest().pids[STEADY_WORKERS - 1]
        if worker not in descendants(os.getpid()):
            raise JobFailed(f"worker {worker} is gone")
        output = job.directory / "strace"
        if not _strace(worker, output, job):
            return None
        return calls_per_step(output.read_text(errors="replace").splitlines())


def _strace(pid: int, output: Path, job: Job) -> bool:
    command = ["strace", "-o", str(output), "-s", "64", "-p", str(pid)]
    try:
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    except FileNotFoundError:
        return False
    assert tracer.stderr is not None
    attached = b"attached" in tracer.stderr.readline()
    job.wait_for(lambda: tracer.poll() is not None, TRACE_SECONDS)
    tracer.send_signal(signal.SIGINT)  # detaches; the worker goes on
    tracer.wait()
    tracer.stderr.close()
    return attached


def calls_per_step(lines: Iterable[str]) -> Calls:
    """From strace's lines: what lies between two lines written to the step log."""
    steps: list[Counter[str]] = []
    current: Counter[str] | None = None
    for line in lines:
        name = line.partition("(")[0]
        if not name.isidentifier():
            continue  # a signal, or a call that was under way when strace came
        if current is not None:
            current[name] += 1
        if name == "write" and STEP_LINE in line:
            if current is not None:
                steps.append(current)
            current = Counter()
    if not steps:
        raise JobFailed("strace saw no whole step")
    kinds = sorted({name for step in steps for name in step})
    means = {name: statistics.fmean(step[name] for step in steps) for name in kinds}
    return Calls(statistics.median(step.total() for step in steps), means)
