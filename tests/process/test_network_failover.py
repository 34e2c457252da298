"""The host of the store is lost, in every way there is: the job goes on, and never twice."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest

from tests.netns import Host, Network
from tests.process.network_jobs import (
    HostNode,
    NetworkJob,
    check_one_world_at_a_time,
    network_job,
)
from tests.support import poll_for

LEASE = 2.0
#: Of one node at least: it is the quorum that keeps a minority from going on, not the size.
FLAGS = f"--nnodes=1:3 --settle=0.5 --lease={LEASE}"

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(300)]


@contextmanager
def training(tmp_path, hosts: int, flags: str = FLAGS, **more):
    """A network, and a job on its first three hosts whose store the first one hosts."""
    with (
        Network(hosts) as network,
        network_job(tmp_path / "job", network, flags, **more) as made,
    ):
        first = made.start_on(network.hosts[0])
        made.wait_for(lambda: first.events("joined"), "the first node hosts")
        for host in network.hosts[1:3]:
            made.start_on(host)
        made.wait_steps(size=min(hosts, 3))
        yield network, made
        check_one_world_at_a_time(made)


def hosting(made: NetworkJob) -> HostNode:
    """The last node that has said so, unless it has joined another since: one that wakes up tries
    to host for a moment."""
    found = []
    for node in made.nodes:
        for event in node.events("joined", "note"):
            text = event.get("text", "")
            if event["type"] == "joined" or "rejoined" in text or "hosting the" in text:
                hosts = event.get("hosting") or "hosting the" in text
                last = (event["mono"] if hosts else 0.0, node)
        found.append(last)
    return max(found, key=lambda one: one[0])[1]


def at_rest(made: NetworkJob, seconds: float) -> bool:
    """Whether nobody makes a step for some time, a lease and more."""
    before = len(made.steps())
    time.sleep(seconds)
    return len(made.steps()) == before


def reasons_to_wait(node: HostNode) -> int:
    """How often a node has said why it waits."""
    return node.stderr.count("majority")


def wait_for_reason(made: NetworkJob, node: HostNode, before: int = 0) -> None:
    made.wait_for(lambda: reasons_to_wait(node) > before, f"{node.host} says why it waits")


def lose(network: Network, host: Host, how: str) -> None:
    if how == "killed":
        host.kill()
    elif how == "frozen":
        host.freeze()
    else:
        network.cut([host], [other for other in network.hosts if other is not host], how=how)


def test_the_host_is_lost_and_comes_back(tmp_path):
    """In four ways, one after the other; most of the time leases of two seconds run out."""
    with training(tmp_path, 3) as (network, made):
        for how in ("killed", "drop", "reset", "frozen"):
            lost, before = hosting(made), made.newest()
            said = reasons_to_wait(lost)
            lose(network, lost.host, how)
            apart = made.wait_steps(size=2, after=before)
            if how in ("drop", "reset"):
                wait_for_reason(made, lost, said)
            if how == "killed":
                made.start_on(lost.host, endpoint="host1,host2,host3")
            lost.host.wake()
            network.heal()
            made.wait_steps(size=3, after=apart)
            assert hosting(made) is not lost, f"{how}: {made.said()}"


@pytest.mark.slow
def test_late_node_finds_the_next_host(tmp_path):
    """By a list of endpoints, the first of which is silent, or by the address of any member."""
    with training(tmp_path, 4) as (network, made):
        before = made.newest()
        lose(network, network.hosts[0], "drop")
        for endpoint in ("host1,host2,host3", "host2"):
            apart = made.wait_steps(size=2, after=before)
            late = made.start_on(network.hosts[3], endpoint=endpoint)
            before = made.wait_steps(size=3, after=apart)
            late.kill()


@pytest.mark.slow
def test_one_host_after_the_other_is_lost(tmp_path):
    with training(tmp_path, 3, f"{FLAGS} --two-node-takeover") as (_, made):
        before = made.newest()
        first = hosting(made)
        first.host.kill()
        apart = made.wait_steps(size=2, after=before)
        hosting(made).host.kill()
        alone = made.wait_steps(size=1, after=apart)
        made.start_on(first.host, endpoint="host1,host2,host3")
        made.wait_steps(size=2, after=alone)


@pytest.mark.slow
def test_two_halves_of_four_both_wait(tmp_path):
    """Neither has more than half; whichever has the host."""
    flags = f"{FLAGS} --nnodes=1:4"
    with training(tmp_path, 4, flags) as (network, made):
        before = made.newest()
        made.start_on(network.hosts[3])
        together = made.wait_steps(size=4, after=before)
        for how in ("drop", "reset"):
            said = [reasons_to_wait(node) for node in made.nodes]
            network.cut(network.hosts[:2], network.hosts[2:], how=how)
            for node, before in zip(made.nodes, said, strict=True):
                wait_for_reason(made, node, before)
            assert at_rest(made, 3 * LEASE), f"{how}: a half went on"
            network.heal()
            together = made.wait_steps(size=4, after=together)


def worker_of(node: HostNode, generation: int) -> int:
    """The process of the only worker of a node."""
    found = lambda: [  # noqa: E731
        each for each in node.events("workers-started") if each["generation"] == generation
    ]
    [started] = poll_for(found, what=f"the worker of {node.host}")
    return started["pids"][0]


@pytest.mark.slow
def test_a_world_that_half_of_its_nodes_never_heard_of_does_not_stop_the_job(tmp_path):
    """The leader waits for a worker to end; the network is cut; the leader forms a world with all.

    Four nodes start, and a lease ends."""
    flags = f"{FLAGS} --nnodes=1:4 --lease=4"
    with training(tmp_path, 4, flags) as (network, made):
        made.start_on(network.hosts[3])
        before = made.wait_steps(size=4)
        first, second, *others = made.nodes
        last = worker_of(second, before)
        made.give(f"stays-{last}")
        os.kill(worker_of(first, before), signal.SIGKILL)
        for node in (first, *others):
            made.wait_for(
                lambda node=node: [
                    one for one in node.events("workers-stopped") if one["generation"] == before
                ],
                f"the worker of {node.host} is stopped",
            )
        network.cut(network.hosts[:2], network.hosts[2:], how="drop")
        os.kill(last, signal.SIGKILL)
        formed = made.wait_for(
            lambda: [one for one in first.events("world-formed") if one["generation"] > before],
            "the leader forms a world",
        )
        assert formed[0]["size"] == 4
        wait_for_reason(made, first)
        network.heal()
        made.wait_steps(size=4, after=formed[0]["generation"])
        assert not [e for e in others[0].events("world-formed") if e["generation"] == before + 1]


@pytest.mark.slow
def test_of_two_nodes_the_hosts_side_goes_on_and_the_other_waits(tmp_path):
    with training(tmp_path, 2) as (network, made):
        together = made.newest()
        for how in ("drop", "reset"):
            network.cut(network.hosts[:1], network.hosts[1:], how=how)
            apart = made.wait_steps(size=1, after=together)
            assert hosting(made) is made.nodes[0]
            network.heal()
            together = made.wait_steps(size=2, after=apart)
        said = reasons_to_wait(made.nodes[1])
        network.hosts[0].kill()
        wait_for_reason(made, made.nodes[1], said)
        assert at_rest(made, 3 * LEASE)
        assert made.newest() == together


@pytest.mark.slow
def test_without_quorum_the_hosts_side_goes_on(tmp_path):
    with training(tmp_path, 3, f"{FLAGS} --quorum=none") as (network, made):
        before = made.newest()
        # Each for itself: two of them are a majority, and could go on as well.
        network.cut(*([host] for host in network.hosts))
        apart = made.wait_steps(size=1, after=before)
        network.heal()
        made.wait_steps(size=3, after=apart)


def test_agents_with_a_list_of_endpoints_start_in_any_order(tmp_path):
    """One that began to host because nobody was there before it leaves that to the first."""
    endpoint = "host1,host2,host3"
    with (
        Network(3) as network,
        network_job(tmp_path / "job", network, FLAGS, endpoint=endpoint) as made,
    ):
        made.start_all(network.hosts[::-1])
        made.wait_steps(size=3)
        began = [node for node in made.nodes if node.events("joined")[0]["hosting"]]
        still = [node for node in began if "no longer hosts the rendezvous" not in node.stderr]
        assert len(still) == 1, made.said()
        check_one_world_at_a_time(made)
