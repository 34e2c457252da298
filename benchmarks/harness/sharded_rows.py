"""The rows of `sharded.py`: a rank of a replica is killed, its replica comes back, a step costs.

Recovery is the time from the kill to the first step that all ranks of a new world have committed,
minus one ordinary step of the old one: a step would have been due anyway.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import processes, steady
from benchmarks.harness.in_process_faults import QUIET_SECONDS, survived
from benchmarks.harness.job import Job, JobFailed, free_port
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Attempt, Repetition, failed, quiet_seconds
from benchmarks.harness.sharded_contestants import (
    COMPUTE,
    NATIVE_SCRIPT,
    OURS_SCRIPT,
    ShardedContestant,
)
from benchmarks.harness.sharded_phases import phases, start_of
from benchmarks.harness.steady import Comparison, Cost
from benchmarks.harness.worker_log import Finish, History, Span
from benchmarks.sizes import SHARDS

SIZE = "1m"
#: Layers that no step uses in the row `back`: 67 MB in each of two shards.
IDLE = 8
#: Steps of a world before a kill: as many tell what an ordinary one takes.
STEPS_BEFORE = 5
#: Less sleep than in the other rows: it is not processor time.
_COST = {"size": SIZE, "workers": 4, "arguments": ("--accelerator=0.01",)}
COST = Comparison("2 x 2", OURS_SCRIPT, NATIVE_SCRIPT, steps=200, **_COST)
SINGLE = Comparison(
    "1 x 2, with snapshots",
    OURS_SCRIPT,
    NATIVE_SCRIPT,
    size=SIZE,
    steps=200,
    workers=SHARDS,
    arguments=("--accelerator=0.01",),
)
CONTROL = Comparison("2 x 2, A/A control", NATIVE_SCRIPT, NATIVE_SCRIPT, steps=200, **_COST)


@dataclass
class ShardedResults(Results):
    """Kills as in any benchmark; besides them, what a step costs when there are none."""

    #: Bytes per second of a plain copy over a socket.
    bandwidth: float = 0.0
    #: Pairs of jobs by comparison.
    steady: dict[str, list[tuple[Cost, Cost]]] = field(default_factory=dict)
    #: Seconds of one joint all-reduce, and of one in a plain gloo group.
    joint: list[tuple[float, float]] = field(default_factory=list)


def kill(contestant: ShardedContestant, workers: int) -> Attempt:
    """SIGKILL to one worker, each time of another rank, until another replica has committed."""

    def hit(job: Job, index: int) -> Repetition:
        world, victim, at = _strike(contestant, job, index, workers)
        found = survived(job, world, at, _replica(world, victim))
        if found.seconds is not None:
            found.details.update(resumed(job.history, world, at))
            if contestant.replace_worker:
                contestant.replace_worker(job, victim)
        return found

    return _attempt(contestant, workers, hit)


def back(contestant: ShardedContestant, workers: int) -> Attempt:
    """The same with a larger model, until all replicas have committed a step together."""

    def hit(job: Job, index: int) -> Repetition:
        world, _, at = _strike(contestant, job, index, workers)
        known, patience = set(job.history.spans), job.launcher.patience
        whole = job.wait_for(
            lambda: job.history.first_finish(after=at, size=workers, not_in=known), patience
        )
        if whole is None:
            return failed(job, known, f"no world of {workers} within {patience:g} s")
        log = [*_lines(job.directory.rglob("events.jsonl"))]
        start = start_of(log, _lines((job.directory / "logs").glob("*.jsonl")), at)
        details = {
            **returned(job.history, world, whole, at),
            "start": round(start[1] - start[0], 5),
            "received": received(log, whole.world),
            "phases": phases(log, start, job.history, world, whole, at),
        }
        return Repetition(details.pop("seconds"), details=details)

    return _attempt(contestant, workers, hit, f"--idle={IDLE}")


def single(contestant: ShardedContestant) -> Attempt:
    """SIGKILL to a worker of the only replica, until all of its workers have committed a step."""

    def hit(job: Job, index: int) -> Repetition:
        world, _, at = _strike(contestant, job, index, SHARDS)
        known, patience = set(job.history.spans), job.launcher.patience
        whole = job.wait_for(
            lambda: job.history.first_finish(after=at, size=SHARDS, not_in=known), patience
        )
        if whole is None:
            return failed(job, known, f"no step of the replica within {patience:g} s")
        step = job.history.step_seconds(world.world)
        details = {"step": round(step, 5), **resumed(job.history, world, at)}
        return Repetition(whole.time - at - step, details=details)

    return _attempt(contestant, SHARDS, hit)


def _attempt(
    contestant: ShardedContestant,
    workers: int,
    hit: Callable[[Job, int], Repetition],
    *arguments: str,
) -> Attempt:
    def start(job: Job) -> None:
        contestant.begin(job)
        job.wait_training(workers, quiet=0.5)

    def make() -> Job:
        job = contestant.job(SIZE, workers=workers)
        job.script += [f"--accelerator={COMPUTE}", *arguments]
        return job

    return Attempt(make, start, hit, contestant.faults_per_job)


def _strike(
    contestant: ShardedContestant, job: Job, index: int, workers: int
) -> tuple[Span, int, float]:
    """Kill a worker of the world that trains; return the world, the worker and the time."""
    job.wait_training(workers, quiet_seconds(index, QUIET_SECONDS))
    world = job.history.latest()

    def known() -> bool:
        return sum(each.world == world.world for each in job.history.finishes) >= STEPS_BEFORE

    if not job.wait_for(known, job.launcher.patience):
        raise JobFailed("fewer steps than tell what an ordinary one takes")
    victim = world.pids[(workers - 1 - 3 * index) % workers]
    at = time.monotonic()
    processes.kill([victim])
    contestant.end_replica(job, victim)
    return world, victim, at


def _replica(world: Span, victim: int) -> set[int]:
    """The processes of a worker's replica."""
    ranks = {pid: rank for rank, pid in world.pids.items()}
    return {pid for pid, rank in ranks.items() if rank // SHARDS == ranks[victim] // SHARDS}


def resumed(history: History, world: Span, at: float) -> dict[str, float]:
    """When the first step after a kill began, and how many committed steps were done again."""
    first = history.first_finish(after=at, not_in={world.world})
    if first is None:
        raise JobFailed("no step after the kill")
    before = [each.number for each in history.finishes if each.world == world.world]
    return {
        "began": round(_began(history, first) - at, 5),
        "redone": max(before) - first.number + 1,
    }


def _began(history: History, finish: Finish) -> float:
    """When the last rank began a step."""
    return max(
        each.began
        for each in history.steps
        if each.world == finish.world and each.number == finish.number
    )


def returned(history: History, world: Span, whole: Finish, at: float) -> dict[str, float]:
    """When all replicas trained again after a kill, and how long the others stood still for it.

    The pause right after the kill is not counted: it is what the row `kill` measures.
    """
    step = history.step_seconds(world.world)
    times = sorted(
        each.time
        for each in history.finishes
        if each.time <= whole.time and each.time > at and each.world != world.world
    )
    pause = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    return {
        "seconds": whole.time - at - step,
        "step": round(step, 5),
        "began": round(_began(history, whole) - at, 5),
        "steps_alone": len(times) - 1,
        "stood_still": round(max(0.0, pause - step) / step, 2) if step else 0.0,
    }


def received(log: Sequence[Mapping[str, Any]], generation: int) -> int:
    """The bytes of state that workers have fetched from others on entering a generation."""
    return sum(
        line["received"]
        for line in log
        if line["type"] == "training" and line["generation"] == generation
    )


def _lines(paths: Iterable[Path]) -> Iterable[dict[str, Any]]:
    """The whole lines of these files."""
    for path in paths:
        for text in path.read_text().split("\n")[:-1]:
            yield json.loads(text)


def joint_times() -> list[tuple[float, float]]:
    """Pairs of seconds: of the all-reduce that joins all workers, and of one in a plain group."""
    address = f"127.0.0.1:{free_port()}"
    given = ("--steps=10", f"--joint={address}")
    with steady.make_job(OURS_SCRIPT, SIZE, *given, workers=4) as job:
        steady.wait_end(job, OURS_SCRIPT)
        return joint_pairs(_lines((job.directory / "logs").glob("*.jsonl")))


def joint_pairs(lines: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """From the lines of all workers: the turns in order, each the mean over the workers."""
    by_pid: dict[int, list[tuple[float, float]]] = {}
    for line in lines:
        if line["event"] == "joint":
            by_pid.setdefault(line["pid"], []).append((line["joint"], line["bare"]))
    turns = zip(*by_pid.values(), strict=True)
    return [
        (statistics.fmean(one for one, _ in turn), statistics.fmean(two for _, two in turn))
        for turn in turns
    ]
