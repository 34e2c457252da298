"""The host of the store is lost, in every way there is: the job goes on, and never twice."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from tests.netns import Host, Network
from tests.process.network_jobs import (
    HostNode,
    NetworkJob,
    check_one_world_at_a_time,
    network_job,
)

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
