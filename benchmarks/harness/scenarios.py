"""The faults: what is done to a running job, and what its workers' logs say it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.harness import processes
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.launchers import Launcher

T = TypeVar("T")

FULL_WORLD = 4  # two nodes of two workers
GROWN_WORLD = 6
#: Each fault hits another rank: the first node's as well as the second's.
VICTIMS = (3, 0, 2, 1)
MAX_FAILED_STARTS = 2
SPLIT = "two worlds trained at the same time"


@dataclass(frozen=True)
class Repetition:
    """One fault and its outcome; `seconds` is None if the job did not recover in time."""

    seconds: float | None
    note: str = ""
    #: Pairs of worlds that trained at the same time, at least one of them new.
    overlaps: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    #: What the nodes of a job that failed printed last; shown, not saved.
    output: str = ""


def quiet_seconds(index: int, least: float = 2.0) -> float:
    """How long a job trains before a fault: 2 to 4 s, spread evenly.

    Heartbeats have a beat. At one fixed delay all faults would meet it at the same place.
    """
    return least + least * (index * 0.618 % 1)


def kill_worker(job: Job, index: int) -> Repetition:
    """SIGKILL to one worker, until all ranks of a world of full size have finished a step."""
    job.wait_training(FULL_WORLD, quiet_seconds(index))
    known = set(job.history.spans)
    victim = job.history.latest().pids[VICTIMS[index % len(VICTIMS)]]
    killed = time.monotonic()
    processes.kill([victim])
    return _recovery(job, killed, known, FULL_WORLD)


def kill_node(job: Job, index: int) -> Repetition:
    """SIGKILL to the node that does not host the rendezvous, until the survivors have stepped."""
    job.wait_training(FULL_WORLD, quiet_seconds(index))
    known = set(job.history.spans)
    killed = job.guest().kill()
    return _recovery(job, killed, known, None)


def add_node(job: Job, index: int) -> Repetition:
    """A third node, started while two train: the longest time in which nobody does."""
    job.wait_training(FULL_WORLD, quiet_seconds(index))
    asked = job.start_node().started
    patience = job.launcher.patience
    first = job.wait_for(lambda: job.history.first_finish(after=asked, size=GROWN_WORLD), patience)
    if first is None:
        return failed(job, set(), f"not admitted within {patience:g} s")
    # Trained for a while, so that a world that lives beside the new one is seen.
    job.wait_for(lambda: job.history.trained_for(GROWN_WORLD, time.monotonic()) >= 2, 10)
    gap = job.history.largest_gap(asked, first.time)
    return _outcome(job, set(), gap, admitted=round(first.time - asked, 4))


def _recovery(job: Job, killed: float, known: set[int], size: int | None) -> Repetition:
    patience = job.launcher.patience
    first = job.wait_for(
        lambda: job.history.first_finish(after=killed, size=size, not_in=known), patience
    )
    if first is None:
        return failed(job, known, f"did not recover within {patience:g} s")
    return _outcome(job, known, first.time - killed)


def _outcome(job: Job, known: set[int], seconds: float, **details: Any) -> Repetition:
    overlaps = job.history.overlapping(known)
    note = SPLIT if overlaps else ""
    return Repetition(seconds, note, len(overlaps), {**details, "worlds": job.worlds(known)})


def failed(job: Job, known: set[int], note: str) -> Repetition:
    ended = not any(node.process.poll() is None for node in job.nodes)
    overlaps = job.history.overlapping(known)
    notes = ["all nodes ended" if ended else note, job.last_words(), SPLIT if overlaps else ""]
    details = {"worlds": job.worlds(known)}
    return Repetition(None, "; ".join(filter(None, notes)), len(overlaps), details, job.output())


@dataclass(frozen=True)
class Scenario:
    """A fault, and whether one job may take several of them in a row."""

    name: str
    title: str
    fault: Callable[[Job, int], Repetition]
    faults_per_job: int = 1
    script: str = "ddp_train.py"


# A worker's restart leaves the job as it was: the same nodes, every worker new.
# A killed or added node does not, so there each fault gets a fresh job.
WORKER = Scenario(
    "worker", "worker SIGKILL → next step of the full world", kill_worker, faults_per_job=5
)
NODE = Scenario("node", "node SIGKILL → next step of the survivors", kill_node)
GROW = Scenario("grow", "a node joins: time in which nobody trains", add_node)
IMPORTS = Scenario(
    "imports",
    "worker SIGKILL, script with 2 s more imports",
    kill_worker,
    faults_per_job=5,
    script="slow_import_train.py",
)
#: Only ours: nobody else keeps a script's state in memory over a restart.
KEEP = Scenario(
    "keep",
    "worker SIGKILL, script that keeps its state",
    kill_worker,
    faults_per_job=5,
    script="kept_train.py",
)


def interleave(launchers: Sequence[tuple[T, int]], block: int) -> Iterator[tuple[T, range]]:
    """Blocks of repetitions (numbered) that alternate between launchers until each has its count.

    Whatever else happens on the machine meanwhile meets all of them.
    """
    done = 0
    while any(done < count for _, count in launchers):
        for launcher, count in launchers:
            if numbers := range(done, min(done + block, count)):
                yield launcher, numbers
        done += block


def run_block(scenario: Scenario, launcher: Launcher, numbers: range) -> Iterator[Repetition]:
    """The faults of these numbers, in jobs of two nodes."""
    return attempts(
        Attempt(
            lambda: Job(launcher, scenario.script), _start, scenario.fault, scenario.faults_per_job
        ),
        numbers,
    )


@dataclass(frozen=True)
class Attempt:
    """How to get a job to train, and what then happens to it."""

    job: Callable[[], Job]
    #: Until it trains; raises JobFailed.
    start: Callable[[Job], None]
    fault: Callable[[Job, int], Repetition]
    faults_per_job: int = 1
    #: Looks at a job that is about to be closed.
    look: Callable[[Job], None] = lambda job: None


def attempts(attempt: Attempt, numbers: range) -> Iterator[Repetition]:
    """The faults of these numbers, in one job while it recovers and may take more, else in new.

    A job that does not get to train is no outcome of a fault: what its nodes printed is shown, it
    is started again, and counted.
    """
    left = list(numbers)
    failed_starts = 0
    while left:
        with attempt.job() as job:
            if (why := _why_not_started(attempt, job)) and failed_starts < MAX_FAILED_STARTS:
                print(f"  failed start: {why}\n{job.output()}", file=sys.stderr)
                failed_starts += 1
                continue
            for number in left[: attempt.faults_per_job]:
                left.remove(number)
                repetition = _suffer(attempt, job, number)
                repetition.details["failed_starts"], failed_starts = failed_starts, 0
                yield repetition
                if repetition.seconds is None:
                    break
            attempt.look(job)


def _start(job: Job) -> None:
    job.start_two_nodes()
    job.wait_training(FULL_WORLD, quiet=0.5)


def _why_not_started(attempt: Attempt, job: Job) -> str:
    """Empty where the job trains."""
    try:
        attempt.start(job)
    except JobFailed as failure:
        return str(failure)
    return ""


def _suffer(attempt: Attempt, job: Job, number: int) -> Repetition:
    try:
        return attempt.fault(job, number)
    except JobFailed as failure:
        return failed(job, set(), str(failure))
