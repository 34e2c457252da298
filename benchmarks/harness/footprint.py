"""What a launcher costs while its worker sleeps: processor time and memory, from /proc."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.harness import processes
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.launchers import Launcher

MEGABYTE = 1_000_000
SETTLE_SECONDS = 3.0  # so that neither the start nor the last step is counted


@dataclass(frozen=True)
class Footprint:
    """Shares of one core, and megabytes."""

    launcher: str
    #: The agent, and the guard if there is one.
    agent_cpu_percent: float
    agent_pss: float
    #: All other processes that are no workers: the zygote and what it forked for the node.
    helpers_pss: float
    #: PSS, and memory that no other process shares, of a worker that has trained.
    worker_pss: float
    worker_unique: float


def measure_footprint(launcher: Launcher, seconds: float) -> Footprint:
    """One worker trains a few steps and sleeps; its agent is then watched for `seconds`."""
    arguments = ("--steps=20", "--then-sleep", f"--seconds={seconds + 120}")
    with Job(launcher, arguments=arguments, workers=1, elastic=False) as job:
        job.start_node()
        if not job.wait_for(lambda: len(job.history.finishes) == 20, launcher.start_patience):
            raise JobFailed(f"{launcher.name}: no steps\n{job.output()}")
        time.sleep(SETTLE_SECONDS)
        return _watch(job, seconds)


def _watch(job: Job, seconds: float) -> Footprint:
    root = job.nodes[0].process.pid
    worker = job.history.latest().pids[0]
    agents = _line(root, worker)
    helpers = set(processes.descendants(root)) - {*agents, worker}
    before = sum(map(processes.cpu_seconds, agents))
    time.sleep(seconds)
    used = sum(map(processes.cpu_seconds, agents)) - before
    shared = processes.memory(worker)
    return Footprint(
        launcher=job.launcher.name,
        agent_cpu_percent=100 * used / seconds,
        agent_pss=sum(map(_pss, agents)),
        helpers_pss=sum(map(_pss, helpers)),
        worker_pss=_pss(worker),
        worker_unique=(shared["Private_Clean"] + shared["Private_Dirty"]) / MEGABYTE,
    )


def _line(root: int, worker: int) -> list[int]:
    """The processes from the launcher down to the worker's parent: guard and agent, or agent."""
    line = [processes.parent(worker)]
    while line[-1] != root:
        line.append(processes.parent(line[-1]))
    return line


def _pss(pid: int) -> float:
    """Its share of the memory it shares, and all of its own."""
    return processes.memory(pid).get("Pss", 0) / MEGABYTE
