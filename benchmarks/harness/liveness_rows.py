"""The rows of `liveness.py`: what is done to a job, and whether, and when, it trains again.

Everything up to the timed moment is the start of an attempt: a situation that does not come about
is made again in another job, and counted as a failed start. Times come from the workers' own logs;
the agents' event logs only say when a situation is there.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import processes
from benchmarks.harness.contestants import MEMORY
from benchmarks.harness.etcd import EtcdServer
from benchmarks.harness.in_process_faults import LEASE
from benchmarks.harness.job import POLL_SECONDS, Job, JobFailed, Node, Place
from benchmarks.harness.launchers import OURS
from benchmarks.harness.scenarios import SPLIT, Attempt, Repetition, failed
from benchmarks.harness.worker_log import History
from tests.netns import Host, Network
from torchelastic.chaos import laws

#: Four nodes that import torch start slowly where cores are few; a job that waits waits an hour.
LAUNCHER = replace(OURS, start_patience=120.0)
SCRIPT, RESIDENT = "ddp_train.py", "resident_train.py"
PORT, ETCD_PORT = 29400, 2379
#: Seconds that a job trains before a fault, and on after it, so that a second world is seen.
QUIET, AFTER = 0.5, 2.0
#: Seconds between two looks for a process that is to be caught while it starts.
INSTANT = 0.002
STORE_HOST = b"torchelastic.worker.store_host"
#: Seconds to the next step where the witness decides, after the lease if it has to end first.
CLAIM_LIMIT = 1.0
WITNESS = "--witness={}/witness"


@dataclass(frozen=True)
class Row:
    """A fault, and from when on the job is to train again."""

    name: str
    title: str
    #: What the time runs from.
    since: str
    attempt: Callable[[Network], Attempt]
    #: Hosts of a network of their own; 0: all nodes share the loopback interface.
    hosts: int = 0
    #: Seconds that the worst repetition may take, where a limit is set.
    limit: float | None = None


# --- nodes, and what they write ------------------------------------------------------------------


def _job(script: str, nodes: str, endpoint: str = "", *, workers: int = 1, flags: str = "") -> Job:
    """A job of ours; `{}` in its flags stands for its directory."""
    arguments = ("--size=1m",) if script == RESIDENT else ()
    job = Job(LAUNCHER, script, arguments, workers=workers, nodes=nodes, parent=MEMORY)
    given = flags.format(job.directory).split()
    job.launcher = replace(LAUNCHER, flags=(*LAUNCHER.flags, *given))
    job.endpoint = endpoint or job.endpoint
    return job


def _start(job: Job, host: Host | None = None) -> Node:
    """Start a node as on a machine of its own: no other has its voter file."""
    number = len(job.nodes)
    logs = ("--log-dir", str(job.directory / f"node-{number}"))
    machine = job.directory / f"tmp-{number}"
    machine.mkdir()
    environment = {"TMPDIR": str(machine)}
    if host is None:
        return job.start_node(place=Place(flags=logs, environment=environment))
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    return job.start_node(place=Place(tuple(host.command([])), logs, environment))


def _start_all(job: Job, *hosts: Host | None) -> None:
    """Start a node on each; the first one hosts the store, and all train."""
    first = len(job.nodes)
    _start(job, hosts[0])
    _await(job, lambda: _events(job, first, "joined"), "the first node joins")
    for host in hosts[1:]:
        _start(job, host)
    job.wait_training(len(hosts), QUIET)


def _events(job: Job, number: int, *kinds: str) -> list[dict[str, Any]]:
    """What the node of this number has written to its event log."""
    return [
        record
        for path in (job.directory / f"node-{number}").rglob("events.jsonl")
        for text in path.read_text().split("\n")[:-1]
        if (record := json.loads(text))["type"] in kinds
    ]


def _in_generation(job: Job, number: int, kind: str, generation: int) -> list[dict[str, Any]]:
    return [one for one in _events(job, number, kind) if one["generation"] == generation]


def _await(job: Job, probe: Callable[[], Any], what: str, poll: float = POLL_SECONDS) -> Any:
    answer = job.wait_for(probe, job.launcher.start_patience, poll)
    if not answer:
        raise JobFailed(f"not seen within {job.launcher.start_patience:g} s: {what}")
    return answer


def _await_reason(job: Job, number: int) -> None:
    """Until the node has said that it waits for a majority."""
    printed = job.directory / f"node-{number}.out"
    what = f"node {number} says why it waits"
    _await(job, lambda: "majority" in printed.read_text(errors="replace"), what)


def _generation(job: Job) -> int:
    """Of the world that made the last step."""
    return max(job.history.latest().generations)


def recovered(
    job: Job, at: float, size: int, first: int | None = None, *, known: set[int] | None = None
) -> Repetition:
    """Wait for the next step of a new world (of `first` ranks), and for a world of `size`.

    The job passes when that trains on, and no law about who makes steps was broken.
    """
    known = set(job.history.spans) if known is None else known
    patience, history = job.launcher.patience, job.history
    next_step = job.wait_for(
        lambda: history.first_finish(after=at, size=first, not_in=known), patience
    )
    if next_step is None:
        return failed(job, known, f"no step within {patience:g} s")
    whole = job.wait_for(lambda: history.first_finish(after=at, size=size, not_in=known), patience)
    if whole is None:
        return failed(job, known, f"no world of {size} within {patience:g} s")
    if not job.wait_for(lambda: history.trained_for(size, time.monotonic()) >= AFTER, patience):
        return failed(job, known, f"no world of {size} trained for {AFTER:g} s")
    details = {"whole": round(whole.time - at, 4), "worlds": job.worlds(known)}
    if wrong := broken(history, known):
        return Repetition(None, wrong, 1, details, job.output())
    return Repetition(next_step.time - at, details=details)


def broken(history: History, known: set[int]) -> str:
    """Which law about who makes steps was broken, in words; empty: none."""
    split = history.overlapping(known) or history.doubled()
    events = [
        laws.StepFinished(step.finished, f"process {step.pid}", step.generation, step.number)
        for step in sorted(history.steps, key=lambda step: step.finished)
    ]
    return "; ".join([SPLIT] * bool(split) + [str(one) for one in laws.check(events)[:1]])


# --- cuts ----------------------------------------------------------------------------------------


def healed_cut(network: Network) -> Attempt:
    """The leader waits for the second node's workers, the network is cut, and the leader forms a
    world with all four, of which the other half never hears."""
    hosts = network.hosts

    def start(job: Job) -> None:
        network.heal()
        _start_all(job, *hosts)
        before = _generation(job)
        [second] = _events(job, 1, "agent-started")
        processes.send([second["pid"]], signal.SIGSTOP)
        [started] = _in_generation(job, 0, "workers-started", before)
        processes.kill(started["pids"])
        for number in (0, 2, 3):
            _await(
                job,
                lambda number=number: _in_generation(job, number, "workers-stopped", before),
                f"the worker of node {number} is stopped",
                poll=INSTANT,
            )
        network.cut(hosts[:2], hosts[2:])
        processes.send([second["pid"]], signal.SIGCONT)
        formed = _await(
            job,
            lambda: [one for one in _events(job, 0, "world-formed") if one["generation"] > before],
            "the leader forms a world",
        )
        if formed[0]["size"] != len(hosts):
            raise JobFailed(f"the leader formed a world of {formed[0]['size']}")
        if _in_generation(job, 2, "world-formed", formed[0]["generation"]):
            raise JobFailed("the other half has heard of the world")
        _await_reason(job, 0)

    def heal(job: Job, index: int) -> Repetition:
        at = time.monotonic()
        network.heal()
        return recovered(job, at, len(hosts))

    return Attempt(lambda: _job(SCRIPT, "1:4", f"host1:{PORT}"), start, heal)


def halves(network: Network) -> Attempt:
    """Two and two do not reach each other: by dropped packets, by resets, in one direction only.
    Neither half may go on."""
    hosts = network.hosts
    ways: tuple[dict[str, Any], ...] = ({}, {"how": "reset"}, {"one_way": True})

    def start(job: Job) -> None:
        network.heal()
        _start_all(job, *hosts)

    def cut(job: Job, index: int) -> Repetition:
        known = set(job.history.spans)
        network.cut(hosts[:2], hosts[2:], **ways[index % len(ways)])
        for number in range(len(hosts)):
            _await_reason(job, number)
        if set(job.history.spans) - known:
            return failed(job, known, "a half trained by itself")
        at = time.monotonic()
        network.heal()
        return recovered(job, at, len(hosts))

    return Attempt(lambda: _job(RESIDENT, "1:4", f"host1:{PORT}"), start, cut)


def pair(kill: bool) -> Callable[[Network], Attempt]:
    """Ranks 1 and 2, neighbours in an all-reduce, do not reach each other; all others do. With
    `kill`, rank 0 is killed at the same moment, so that a new world has to meet."""

    def make(network: Network) -> Attempt:
        hosts = network.hosts

        def start(job: Job) -> None:
            network.heal()
            _start_all(job, *hosts)

        def cut(job: Job, index: int) -> Repetition:
            pids = job.history.latest().pids
            [one], [other] = ([h for h in hosts if pids[rank] in h.pids()] for rank in (1, 2))
            at = time.monotonic()
            network.cut([one], [other])
            processes.kill([pids[0]] if kill else [])
            return recovered(job, at, len(hosts) - 1, len(hosts) - 1)

        return Attempt(lambda: _job(RESIDENT, "1:4", f"host1:{PORT}"), start, cut)

    return make


def etcd_cut(network: Network) -> Attempt:
    """One of three nodes reaches etcd, which is on the last host, and no peer; each in turn."""
    *hosts, etcd = network.hosts
    endpoint = f"{etcd.address}:{ETCD_PORT}"
    url = f"http://{endpoint}"

    def start(job: Job) -> None:
        network.heal()
        data = job.directory / "etcd"
        command = [EtcdServer.program() or "etcd", f"--data-dir={data}"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        job.start(etcd.command(command), {})
        _start_all(job, *hosts)

    def cut(job: Job, index: int) -> Repetition:
        lost = hosts[index % len(hosts)]
        at = time.monotonic()
        network.cut([lost], [host for host in hosts if host is not lost])
        return recovered(job, at, len(hosts) - 1, len(hosts) - 1)

    flags = "--rdzv-backend=etcd"
    return Attempt(lambda: _job(RESIDENT, "1:3", endpoint, flags=flags), start, cut)


# --- lost processes ------------------------------------------------------------------------------


def _standbys(job: Job) -> list[int]:
    """Workers of the first node that were started to enter a later world."""
    return [one["worker_pid"] for one in _events(job, 0, "standby-started")]


def spare_host(flags: str = "") -> Callable[[Network], Attempt]:
    """The host's worker is being replaced, so the other node trains alone; that one is killed, and
    a new node without a vote is started."""

    def start(job: Job) -> None:
        _start_all(job, None, None)
        before = len(_standbys(job))
        below = set(processes.descendants(job.nodes[0].process.pid))
        processes.kill(below & set(job.history.latest().pids.values()))
        found = _await(job, lambda: _standbys(job)[before:], "a replacement", poll=INSTANT)
        processes.send(found, signal.SIGSTOP)  # it warms up
        job.wait_training(1, QUIET)

    def lose(job: Job, index: int) -> Repetition:
        known = set(job.history.spans)
        at = job.nodes[1].kill()
        _start(job)
        processes.send(_standbys(job), signal.SIGCONT)
        return recovered(job, at, 2, known=known)

    return lambda network: Attempt(lambda: _job(RESIDENT, "1:2", flags=flags), start, lose)


def helper(network: Network) -> Attempt:
    """The process that holds the workers' stores is killed, and so is the next one as it starts:
    without a zygote that takes as long as torch's import."""

    def lose(job: Job, index: int) -> Repetition:
        killed: set[int] = set()
        for _ in range(2):
            new = _await(job, lambda: _store_hosts(job) - killed, "a store host", poll=INSTANT)
            at = time.monotonic()
            processes.kill(new)
            killed.update(new)
        return recovered(job, at, 2)

    return Attempt(
        lambda: _job(SCRIPT, "1:1", workers=2, flags="--no-zygote"),
        lambda job: _start_workers(job, 2),
        lose,
    )


def _start_workers(job: Job, count: int) -> None:
    _start(job)
    job.wait_training(count, QUIET)


def _store_hosts(job: Job) -> set[int]:
    return {
        pid
        for node in job.nodes
        for pid in processes.descendants(node.process.pid)
        if STORE_HOST in processes.command_line(pid)
    }


def witness(lost: int) -> Callable[[Network], Attempt]:
    """All of one of two nodes is killed: that of the host (0), or the other one."""

    def lose(job: Job, index: int) -> Repetition:
        known = set(job.history.spans)
        return recovered(job, job.nodes[lost].kill(), 1, known=known)

    return lambda network: Attempt(
        lambda: _job(RESIDENT, "1:2", flags=WITNESS), lambda job: _start_all(job, None, None), lose
    )


ROWS = (
    Row(
        "healed-cut",
        "a world that half of four nodes never heard of, then the cut is healed",
        "healing",
        healed_cut,
        hosts=4,
    ),
    Row("halves", "four nodes cut two and two, then healed", "healing", halves, hosts=4),
    Row("pair", "two of four nodes cut off from each other", "the cut", pair(False), hosts=4),
    Row(
        "pair-kill",
        "the same, and the host's worker is killed",
        "the cut",
        pair(True),
        hosts=4,
    ),
    Row("etcd-cut", "one of three nodes reaches etcd and no peer", "the cut", etcd_cut, hosts=4),
    Row("spare-host", "the host is a spare, the other node is replaced", "the kill", spare_host()),
    Row("helper", "the store host is killed, and the next one", "the last kill", helper),
    Row("witness-host", "the host of two is killed", "the kill", witness(0), limit=CLAIM_LIMIT),
    Row("witness-other", "the other of two is killed", "the kill", witness(1), limit=CLAIM_LIMIT),
    Row(
        "witness-spare",
        "as `spare-host`, with a witness",
        "the kill",
        spare_host(WITNESS),
        limit=LEASE + CLAIM_LIMIT,
    ),
)
