"""What becomes of a training whose rendezvous host is killed, frozen or cut off.

Three nodes of one in-process worker each; the node that hosts the embedded store is the one that is
lost, with its worker. The other two are a majority and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness import processes
from benchmarks.harness.contestants import OURS_IN_PROCESS
from benchmarks.harness.in_process_faults import LEASE, QUIET_SECONDS, recovery
from benchmarks.harness.job import Job, JobFailed, Node, Place
from benchmarks.harness.network import ADDRESSES, Network
from benchmarks.harness.scenarios import SPLIT, Attempt, Repetition, failed, quiet_seconds
from benchmarks.harness.worker_log import Finish, Span

NODES = 3
NOBODY_LEFT = "the job ended with its host"
#: Seconds the survivors train on while it is looked for another world beside theirs.
BESIDE = 1.0
#: The size of the model, as in the other faults of in-process workers.
SIZE = "1m"
KILL_LIMIT = 1.0
SILENCE_LIMIT = LEASE + 1.0


@dataclass(frozen=True)
class HostFault:
    """A way to lose the host."""

    name: str
    attempt: Attempt


def host_of(job: Job) -> Node:
    """The node whose agent listens at the endpoint."""
    port = int(job.endpoint.split(":")[1])
    hosts = [node for node in job.nodes if processes.listens(node.process.pid, port)]
    if len(hosts) != 1:
        raise JobFailed(f"{len(hosts)} of {len(job.nodes)} nodes host the rendezvous")
    return hosts[0]


def kill() -> HostFault:
    def lose(job: Job) -> tuple[Node, float]:
        host = host_of(job)
        return host, host.kill()

    return HostFault("host-kill", _attempt(lose))


def freeze() -> HostFault:
    def lose(job: Job) -> tuple[Node, float]:
        host = host_of(job)
        return host, host.freeze()

    return HostFault("host-freeze", _attempt(lose))


def cut(network: Network) -> HostFault:
    """The host is here, the two others beside, and the cable between them is cut."""
    here, beside = network.places

    def lose(job: Job) -> tuple[Node, float]:
        return job.nodes[0], network.cut()

    def start(job: Job) -> None:
        network.heal()
        _start(job, here, beside, beside)

    attempt = replace(_attempt(lose), job=lambda: _job(ADDRESSES[0]), start=start)
    return HostFault("host-cut", attempt)


def _attempt(lose: Callable[[Job], tuple[Node, float]]) -> Attempt:
    """Every job loses one host only: it has two nodes left then, and no majority without both."""

    def hit(job: Job, index: int) -> Repetition:
        job.wait_training(NODES, quiet_seconds(index, QUIET_SECONDS))
        world = job.history.latest()
        below = {node: set(processes.descendants(node.process.pid)) for node in job.nodes}
        host, at = lose(job)
        found = _survived(job, world, at, host, set(world.pids.values()) & below[host])
        host.kill()  # frozen or cut off it would not end by itself
        return found

    return Attempt(lambda: _job("127.0.0.1"), lambda job: _start(job, *[Place()] * NODES), hit)


def _survived(job: Job, world: Span, at: float, host: Node, lost: set[int]) -> Repetition:
    """Wait for the first step of a world of all survivors, and whether it is the only world."""
    known, patience = set(job.history.spans), job.launcher.patience
    others = [node.process for node in job.nodes if node is not host]

    def first() -> Finish | None:
        return job.history.first_finish(after=at, size=NODES - 1, not_in=known)

    job.wait_for(lambda: first() or all(each.poll() is not None for each in others), patience)
    finish = first()
    if finish is None:
        found = failed(job, known, f"did not recover within {patience:g} s")
        ended = all(each.poll() is not None for each in others)
        return replace(found, note=NOBODY_LEFT) if ended else found
    # A host that trains on by itself, beside the others, is not to go unseen.
    job.wait_for(lambda: job.history.trained_for(NODES - 1, time.monotonic()) >= BESIDE, patience)
    found = recovery(job.history, world, finish, at, lost)
    overlaps = len(job.history.overlapping({world.world}))
    return replace(found, overlaps=overlaps, note=SPLIT) if overlaps else found


def _job(address: str) -> Job:
    return OURS_IN_PROCESS.job(SIZE, f"1:{NODES}", workers=1, address=address)


def _start(job: Job, *places: Place) -> None:
    for place in places:
        job.start_node(place=place)
    job.wait_training(NODES, quiet=0.5)
