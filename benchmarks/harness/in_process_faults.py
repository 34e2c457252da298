"""The faults of `in_process.py`: what is done to four workers that train, and what it cost them.

Recovery is the time from the fault to the first step that the survivors have committed in a new
world, minus one ordinary step of the old one: a step would have been due anyway.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import processes
from benchmarks.harness.contestants import OURS_IN_PROCESS, WORKERS, Contestant
from benchmarks.harness.job import HEAD_START_SECONDS, Job, Node, Place
from benchmarks.harness.network import ADDRESSES, Network
from benchmarks.harness.scenarios import Attempt, Repetition, failed, quiet_seconds
from benchmarks.harness.worker_log import Finish, History, Span

QUIET_SECONDS = 1.0
#: The name of the file that is a preemption notice.
NOTICE = "notice"
PROGRESS_LIMIT = 1.0
LEASE = 3.0  # the default of --lease
#: What an agent's event log says of a worker that it killed because nothing else freed it.
LAST_RESORT = ("worker-killed", "not free ")


@dataclass(frozen=True)
class Fault:
    """One row: a fault, at a size of the model."""

    name: str
    title: str
    size: str
    #: Makes the job, starts it, does it.
    attempt: Callable[[Contestant, Fault], Attempt]


def train_first(job: Job, index: int) -> Span:
    """Let the job train for a while; return its world."""
    job.wait_training(WORKERS, quiet_seconds(index, QUIET_SECONDS))
    return job.history.latest()


def survived(job: Job, world: Span, at: float, lost: set[int]) -> Repetition:
    """Wait for the first step of a new world after a fault that took the processes `lost`."""
    known = set(job.history.spans)
    patience = job.launcher.patience
    first = job.wait_for(lambda: job.history.first_finish(after=at, not_in=known), patience)
    if first is None:
        return failed(job, known, f"did not recover within {patience:g} s")
    return recovery(job.history, world, first, at, lost)


def recovery(history: History, world: Span, first: Finish, at: float, lost: set[int]) -> Repetition:
    """What the logs say of a fault. Survivors that the new world left out are told in a note."""
    old, new = set(world.pids.values()) - lost, set(history.spans[first.world].pids.values())
    step = history.step_seconds(world.world)
    left_out = len(old - new)
    details: dict[str, Any] = {
        "step": round(step, 5),
        "size": first.size,
        "newcomers": len(new - old),
        "left_out": left_out,
    }
    torn = 0 < left_out < len(old)  # all of them: their processes were started anew
    note = f"the first world left out {left_out} of {len(old)} survivors" if torn else ""
    return Repetition(first.time - at - step, note, details=details)


def _signal_worker(number: signal.Signals) -> Callable[[Contestant, Fault], Attempt]:
    """A signal to one worker, each time of another rank."""

    def make(contestant: Contestant, fault: Fault) -> Attempt:
        def hit(job: Job, index: int) -> Repetition:
            world = train_first(job, index)
            victim = world.pids[contestant.victims[index % len(contestant.victims)]]
            at = time.monotonic()
            processes.send([victim], number)
            found = survived(job, world, at, {victim})
            if contestant.replace_worker and found.seconds is not None:
                contestant.replace_worker(job, victim)
            return found

        def start(job: Job) -> None:
            contestant.begin(job)
            job.wait_training(WORKERS, quiet=0.5)

        return Attempt(lambda: contestant.job(fault.size), start, hit, contestant.faults_per_job)

    return make


def _lose_node(lose: Callable[[Job], tuple[Node, float]]) -> Callable[[Contestant, Fault], Attempt]:
    """The node of two that does not host the rendezvous falls silent; every job loses one only."""

    def hit(job: Job, index: int) -> Repetition:
        world = train_first(job, index)
        node, at = lose(job)
        below = set(processes.descendants(node.process.pid))
        found = survived(job, world, at, set(world.pids.values()) & below)
        node.kill()  # it would not end by itself
        return found

    def make(contestant: Contestant, fault: Fault) -> Attempt:
        return Attempt(
            lambda: contestant.job(fault.size, "1:2", WORKERS // 2), _start_two_nodes, hit
        )

    return make


def _freeze(job: Job) -> tuple[Node, float]:
    node = job.guest()
    return node, node.freeze()


def _start_two_nodes(job: Job) -> None:
    job.start_two_nodes()
    job.wait_training(WORKERS, quiet=0.5)


def cut_node(network: Network) -> Fault:
    """As a frozen node, but it is the network between the two that is gone."""

    def cut(job: Job) -> tuple[Node, float]:
        return job.nodes[1], network.cut()

    def start(job: Job) -> None:
        network.heal()
        for place in network.places:
            job.start_node(place=place)
        job.wait_training(WORKERS, quiet=0.5)

    def make(contestant: Contestant, fault: Fault) -> Attempt:
        lost = _lose_node(cut)(contestant, fault)
        return replace(
            lost,
            job=lambda: contestant.job(fault.size, "1:2", WORKERS // 2, ADDRESSES[0]),
            start=start,
        )

    return Fault("cut", "node cut off without a reset", "1m", make)


def _join_worker(contestant: Contestant, fault: Fault) -> Attempt:
    """A second node of one worker is started: how long the others stood still for it."""

    def start(job: Job) -> None:
        contestant.begin(job)
        job.wait_training(WORKERS, quiet=0.5)

    def join(job: Job, index: int) -> Repetition:
        world = train_first(job, index)
        asked = job.start_node(workers=1).started
        patience = job.launcher.patience
        first = job.wait_for(
            lambda: job.history.first_finish(after=asked, size=WORKERS + 1), patience
        )
        if first is None:
            return failed(job, set(), f"not admitted within {patience:g} s")
        return standstill(job.history, world, first, asked)

    return Attempt(lambda: contestant.job(fault.size, "1:2"), start, join)


def standstill(history: History, world: Span, first: Finish, asked: float) -> Repetition:
    """How long nobody committed a step while a newcomer came, and whether that was for its world.

    A newcomer takes processor time before it is admitted, too: where cores are busy, a pause then
    may be the longest.
    """
    step, gap = history.step_seconds(world.world), history.largest_gap(asked, first.time)
    change = first.time - max(each.time for each in history.finishes if each.time < first.time)
    details = {
        "step": round(step, 5),
        "admitted": round(first.time - asked, 4),
        "change": round(change - step, 5),
    }
    longer = f"the longest pause came before the newcomer did, whose world took {change - step:.3f}"
    return Repetition(gap - step, longer if gap > change else "", details=details)


def _take_machine(contestant: Contestant, fault: Fault) -> Attempt:
    """One node of two gets a preemption notice: how long the other stood still, and how many
    steps began twice."""

    def start(job: Job) -> None:
        job.start_node()
        time.sleep(HEAD_START_SECONDS)
        job.start_node(place=Place(flags=("--preemption", f"file={job.directory / NOTICE}")))
        job.wait_training(WORKERS, quiet=0.5)

    def notice(job: Job, index: int) -> Repetition:
        world = train_first(job, index)
        at = time.monotonic()
        (job.directory / NOTICE).write_text("30 the machine is taken away")
        patience = job.launcher.patience
        first = job.wait_for(
            lambda: job.history.first_finish(after=at, size=WORKERS // 2), patience
        )
        if first is None:
            return failed(job, set(), f"did not go on within {patience:g} s")
        step, gap = job.history.step_seconds(world.world), job.history.largest_gap(at, first.time)
        numbers = [each.number for each in job.history.finishes]
        begun = [each.number for each in job.history.steps if each.world == world.world]
        redone = len(numbers) - len(set(numbers)) + (max(begun) >= first.number)
        details = {
            "step": round(step, 5),
            "steps": round((gap - step) / step, 1),
            "redone": redone,
            "noticed": round(first.time - at, 4),
        }
        return Repetition(gap - step, f"{redone} steps redone" if redone else "", details=details)

    return Attempt(lambda: contestant.job(fault.size, "1:2", WORKERS // 2), start, notice)


KILL = Fault("kill", "worker SIGKILL", "1m", _signal_worker(signal.SIGKILL))
KILL_LARGE = replace(KILL, name="kill-25m", size="25m")
STOP = Fault("stop", "worker SIGSTOP", "1m", _signal_worker(signal.SIGSTOP))
FREEZE = Fault("freeze", "node SIGSTOP", "1m", _lose_node(_freeze))
JOIN = Fault("join", "a worker joins", "1m", _join_worker)
NOTICED = Fault("notice", "a preemption notice", "1m", _take_machine)
JOIN_LARGE = replace(JOIN, name="join-25m", size="25m")

WATCHED = replace(
    OURS_IN_PROCESS,
    launcher=replace(
        OURS_IN_PROCESS.launcher,
        flags=(*OURS_IN_PROCESS.launcher.flags, "--progress-timeout", f"{PROGRESS_LIMIT:g}"),
    ),
)


def last_resorts(directory: Path) -> int:
    """How often agents of a job had to kill a worker that was not freed, by their event logs.

    Workers that we have frozen do not count: nothing could have freed them.
    """
    lines = (
        json.loads(line)
        for path in directory.rglob("events.jsonl*")
        for line in path.read_text().splitlines()
    )
    return sum(_is_last_resort(line) for line in lines)


def _is_last_resort(line: dict[str, Any]) -> bool:
    kind, reason = LAST_RESORT
    said = line.get("reason", "")
    return line.get("type") == kind and said.startswith(reason) and "frozen" not in said
