"""The host of the store is lost, in every way there is: the job goes on, and never twice."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from tests.netns import Host, Network
from tests.process.network_jobs import (
    RESIDENT,
    HostNode,
    NetworkJob,
    check_one_world_at_a_time,
    network_job,
)

#: Of one node at least: it is the quorum that keeps a minority from going on, not the size.
FLAGS = "--nnodes=1:3 --lease=2"
LEASE = 2.0
ENDLESS = {"script": RESIDENT, "steps": 1_000_000, "slow": 0.05}

#: Several nodes import torch at the same time, on however few cores.
pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(300)]


@contextmanager
def training(tmp_path, hosts: int, flags: str = FLAGS, **more):
    """A network, and a job on its first three hosts whose store the first one hosts."""
    with (
        Network(hosts) as network,
        network_job(tmp_path / "job", network, flags, **ENDLESS, **more) as made,
    ):
        first = made.start_on(network.hosts[0])
        made.wait_for(lambda: first.events("joined"), "the first node hosts")
        for host in network.hosts[1:3]:
            made.start_on(host)
        made.wait_steps(size=min(hosts, 3))
        yield network, made
        check_one_world_at_a_time(made)


def newest(made: NetworkJob) -> int:
    return max(line["generation"] for line in made.steps())


def at_rest(made: NetworkJob, seconds: float) -> bool:
    """Whether nobody makes a step for some time, a lease and more."""
    before = len(made.steps())
    time.sleep(seconds)
    return len(made.steps()) == before


def says_why_it_waits(node: HostNode) -> bool:
    return "majority" in node.stderr


def lose(network: Network, host: Host, how: str) -> None:
    if how == "killed":
        host.kill()
    elif how == "frozen":
        host.freeze()
    else:
        network.cut([host], [other for other in network.hosts if other is not host], how=how)


def restore(network: Network, made: NetworkJob, host: Host, how: str) -> None:
    if how == "killed":
        made.start_on(host)
    host.wake()
    network.heal()


WAYS = [
    "killed",
    pytest.param("frozen", marks=pytest.mark.slow),
    pytest.param("drop", marks=pytest.mark.slow),
    pytest.param("reset", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", WAYS)
def test_the_host_is_lost_and_comes_back(tmp_path, how):
    with training(tmp_path, 3) as (network, made):
        before = newest(made)
        lose(network, network.hosts[0], how)
        apart = made.wait_steps(size=2, after=before)
        if how in ("drop", "reset"):
            made.wait_for(lambda: says_why_it_waits(made.nodes[0]), "the old host says why")
        restore(network, made, network.hosts[0], how)
        made.wait_steps(size=3, after=apart)
        assert len({line["pid"] for line in made.steps(generation=newest(made))}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "drop"])
@pytest.mark.parametrize("endpoint", ["host1,host2,host3", "host2"])
def test_who_comes_later_finds_the_next_host(tmp_path, how, endpoint):
    """By a list of endpoints, or by the address of any living member."""
    with training(tmp_path, 4) as (network, made):
        before = newest(made)
        lose(network, network.hosts[0], how)
        apart = made.wait_steps(size=2, after=before)
        made.start_on(network.hosts[3], endpoint=endpoint)
        made.wait_steps(size=3, after=apart)


@pytest.mark.slow
def test_one_host_after_the_other_is_lost(tmp_path):
    with training(tmp_path, 3, "--nnodes=1:3 --lease=2 --two-node-takeover") as (network, made):
        before = newest(made)
        network.hosts[0].kill()
        apart = made.wait_steps(size=2, after=before)
        network.hosts[1].kill()
        alone = made.wait_steps(size=1, after=apart)
        made.start_on(network.hosts[0], endpoint="host1,host2,host3")
        made.wait_steps(size=2, after=alone)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "reset"])
def test_two_halves_of_four_both_wait(tmp_path, how):
    """Neither has more than half; whichever has the host."""
    with training(tmp_path, 4, "--nnodes=1:4 --lease=2") as (network, made):
        before = newest(made)
        made.start_on(network.hosts[3])
        together = made.wait_steps(size=4, after=before)
        network.cut(network.hosts[:2], network.hosts[2:], how=how)
        for node in made.nodes:
            made.wait_for(lambda node=node: says_why_it_waits(node), f"{node.host} waits")
        assert at_rest(made, 3 * LEASE), "a half went on"
        network.heal()
        made.wait_steps(size=4, after=together)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "reset"])
def test_of_two_nodes_the_hosts_side_goes_on(tmp_path, how):
    with training(tmp_path, 2, "--nnodes=1:2 --lease=2") as (network, made):
        before = newest(made)
        pid = made.steps(generation=before, rank=0)[0]["pid"]
        network.cut(network.hosts[:1], network.hosts[1:], how=how)
        apart = made.wait_steps(size=1, after=before)
        assert {line["pid"] for line in made.steps(generation=apart)} == {pid}
        network.heal()
        made.wait_steps(size=2, after=apart)


@pytest.mark.slow
def test_the_other_of_two_nodes_waits_for_the_host(tmp_path):
    with training(tmp_path, 2, "--nnodes=1:2 --lease=2") as (network, made):
        before = newest(made)
        network.hosts[0].kill()
        made.wait_for(lambda: says_why_it_waits(made.nodes[1]), "it waits")
        assert at_rest(made, 3 * LEASE)
        assert newest(made) == before


@pytest.mark.slow
def test_without_quorum_the_hosts_side_goes_on(tmp_path):
    with training(tmp_path, 3, f"{FLAGS} --quorum=none") as (network, made):
        before = newest(made)
        network.cut(network.hosts[:1], network.hosts[1:])
        apart = made.wait_steps(size=1, after=before)
        network.heal()
        made.wait_steps(size=3, after=apart)


@pytest.mark.slow
def test_agents_with_a_list_of_endpoints_start_in_any_order(tmp_path):
    with (
        Network(3) as network,
        network_job(
            tmp_path / "job", network, FLAGS, endpoint="host1,host2,host3", **ENDLESS
        ) as made,
    ):
        made.start_all(network.hosts[::-1])
        made.wait_steps(size=3)
        hosting = [node.host for node in made.nodes if node.events("joined")[0]["hosting"]]
        assert len(hosting) == 1, made.said()
        check_one_world_at_a_time(made)
