"""Jobs on hosts of their own, on networks that lose, delay, reset and cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.netns import Network
from tests.process.network_jobs import (
    PORT,
    RESIDENT,
    NetworkJob,
    check_one_world_at_a_time,
    network_job,
)

MEET_BY_ENV = Path(__file__).with_name("meet_by_env.py")
#: Steps that go on until the test has seen enough.
ENDLESS = {"script": RESIDENT, "steps": 1_000_000, "slow": 0.05}

#: Several nodes import torch at the same time, on however few cores.
pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(300)]


# --- cut off and back again ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["drop", pytest.param("reset", marks=pytest.mark.slow)])
def test_a_node_that_is_cut_off_is_taken_out_and_comes_back(tmp_path, how):
    flags = "--nnodes=1:3 --lease=2"
    with Network(3) as network, network_job(tmp_path / "job", network, flags, **ENDLESS) as made:
        nodes = made.start_all(network.hosts)
        together = made.wait_steps(size=3)
        network.cut(network.hosts[:2], network.hosts[2:], how=how)
        apart = made.wait_steps(size=2, after=together)
        made.wait_for(lambda: nodes[2].events("lease-lost"), "the third node knows")
        network.heal()
        made.wait_steps(size=3, after=apart)
        check_one_world_at_a_time(made)


def test_a_reset_is_no_death(tmp_path):
    flags = "--nnodes=1:2 --lease=2"
    with Network(2) as network, network_job(tmp_path / "job", network, flags, **ENDLESS) as made:
        nodes = made.start_all(network.hosts)
        together = made.wait_steps(size=2)
        for _ in range(3):
            assert network.hosts[1].reset_connections(PORT) > 0
            step = max(line["step"] for line in made.steps())
            made.wait_for(
                lambda step=step: [line for line in made.steps() if line["step"] > step + 5],
                "steps after it",
            )
        assert {line["generation"] for line in made.steps()} == {together}, made.said()
        assert not any(node.events("lease-lost", "node-lost") for node in nodes)


@pytest.mark.slow
def test_a_slow_network_that_loses_packets_will_do(tmp_path):
    flags = "--nnodes=1:2"
    with Network(2) as network, network_job(tmp_path / "job", network, flags, **ENDLESS) as made:
        network.worsen(delay_ms=50, loss_percent=5)
        made.start_all(network.hosts)
        together = made.wait_steps(5, size=2)
        network.hosts[1].kill()
        made.wait_steps(size=1, after=together)
        check_one_world_at_a_time(made)


# --- addresses -----------------------------------------------------------------------------------


def stores_met_at(made: NetworkJob, workers: int) -> set[str]:
    """Wait for the end of a job whose workers meet by `env://`; where they met."""
    assert [node.wait(60) for node in made.nodes] == [0] * len(made.nodes), made.said()
    met = made.lines(event="met")
    assert [line["total"] for line in met] == [sum(range(workers))] * workers, made.said()
    return {line["env"]["MASTER_ADDR"] for line in met}


@pytest.mark.parametrize(
    "endpoint", ["[fd77::1]:29400", pytest.param("host1", marks=pytest.mark.slow)]
)
def test_ipv6_alone_will_do(tmp_path, endpoint):
    with (
        Network(2, ipv4=False) as network,
        network_job(
            tmp_path / "job", network, "--nnodes=2", endpoint=endpoint, script=MEET_BY_ENV
        ) as made,
    ):
        made.start_all(network.hosts)
        assert stores_met_at(made, 2) <= {host.ipv6 for host in network.hosts}


@pytest.mark.slow
def test_names_may_come_late_and_mean_something_else_at_home(tmp_path):
    """As Debian has it, a machine's name means 127.0.1.1 there, and has an address elsewhere."""
    with (
        Network(2, ipv6=False) as network,
        network_job(
            tmp_path / "job", network, "--nnodes=2", endpoint="meet", script=MEET_BY_ENV
        ) as made,
    ):
        first, second = network.hosts
        first.names({})
        second.names({})
        for node in made.start_all(network.hosts):
            made.wait_for(lambda node=node: node.events("agent-started"), "the agents")
        assert not any(node.events("joined") for node in made.nodes)
        second.names({"meet": [first.ipv4], "host2": ["127.0.1.1"]})
        first.names({"meet": ["127.0.1.1"], "host1": ["127.0.1.1"]})
        assert stores_met_at(made, 2) <= {first.ipv4, second.ipv4}


@pytest.mark.slow
def test_the_user_may_say_which_address_others_reach(tmp_path):
    with (
        Network(2, ipv6=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2", script=MEET_BY_ENV) as made,
    ):
        others = ["10.77.0.101", "10.77.0.102"]
        for host, address in zip(network.hosts, others, strict=True):
            host.run(["ip", "addr", "add", f"{address}/24", "dev", "eth0"])
            made.start_on(host, f"--local-addr={address}")
        assert stores_met_at(made, 2) <= set(others)


def test_two_jobs_at_one_endpoint_do_not_meet(tmp_path):
    with Network(2) as network, network_job(tmp_path / "job", network, "--nnodes=1:2") as made:
        first, second = network.hosts
        job = made.start_on(first)
        made.wait_for(lambda: job.events("joined"), "the first job is there")
        for host in (first, second):
            other = made.start_on(host, run_id="another")
            assert other.wait(60) != 0
            assert "belongs to job 'net'" in other.stderr
            assert "a port of its own" in other.stderr
        assert job.process.poll() is None
