"""Jobs on hosts of their own, on networks that lose, delay, reset and cut."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.netns import Host, Network
from tests.process import chaos_cuts
from tests.process.network_jobs import PORT, NetworkJob, check_one_world_at_a_time, network_job
from tests.support import SOAK, poll_for

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.timeout(300)]


# --- cut off and back again ----------------------------------------------------------------------


def test_a_node_that_is_cut_off_is_taken_out_and_comes_back(tmp_path):
    """By dropped packets and by resets: each time it loses its lease, of two seconds."""
    flags = "--nnodes=1:3 --lease=2 --settle=0.5"
    with Network(3) as network, network_job(tmp_path / "job", network, flags) as made:
        nodes = made.start_all(network.hosts)
        together = made.wait_steps(size=3)
        for how in ("drop", "reset"):
            before = len(nodes[2].events("lease-lost"))
            network.cut(network.hosts[:2], network.hosts[2:], how=how)
            apart = made.wait_steps(size=2, after=together)
            made.wait_for(
                lambda before=before: len(nodes[2].events("lease-lost")) > before,
                f"{how}: the third node knows",
            )
            network.heal()
            together = made.wait_steps(size=3, after=apart)
        check_one_world_at_a_time(made)


def test_a_reset_is_no_death(tmp_path):
    flags = "--nnodes=1:2 --settle=60"
    with Network(2) as network, network_job(tmp_path / "job", network, flags) as made:
        nodes = made.start_all(network.hosts)
        together = made.wait_steps(size=2)
        for _ in range(3):
            made.wait_for(lambda: network.hosts[1].reset_connections(PORT), "a connection to reset")
            enough = len(made.steps()) + 20
            made.wait_for(lambda enough=enough: len(made.steps()) > enough, "steps after it")
        assert {line["generation"] for line in made.steps()} == {together}, made.said()
        assert not any(node.events("lease-lost", "node-lost") for node in nodes)


@pytest.mark.slow
def test_a_slow_network_that_loses_packets_will_do(tmp_path):
    with Network(2) as network, network_job(tmp_path / "job", network, "--nnodes=1:2") as made:
        network.worsen(delay_ms=50, loss_percent=5)
        made.start_all(network.hosts)
        together = made.wait_steps(5, size=2)
        network.hosts[1].kill()
        made.wait_steps(size=1, after=together)
        check_one_world_at_a_time(made)


# --- addresses -----------------------------------------------------------------------------------


def masters(made: NetworkJob, size: int = 2) -> set[str]:
    """Wait for a world; where its workers are told to meet."""
    together = made.wait_steps(size=size)
    return {line["master"] for line in made.steps(generation=together)}


def test_ipv6_alone_will_do(tmp_path):
    """The endpoint may be an address or a name."""
    with (
        Network(2, ipv4=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2") as made,
    ):
        for host, endpoint in zip(network.hosts, ("[fd77::1]:29400", "host1"), strict=True):
            made.start_on(host, endpoint=endpoint)
        assert masters(made) <= {host.ipv6 for host in network.hosts}


#: Meets the others by `env://`, as any script of torch's, and adds up their ranks.
MEET = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
line = {"event": "met", "total": int(total), "master": os.environ["MASTER_ADDR"]}
with open(f"{sys.argv[1]}/{os.getpid()}", "w") as file:
    file.write(json.dumps(line) + "\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_workers_meet_by_env_where_there_is_ipv6_alone(tmp_path):
    """With `init_process_group`; two nodes import torch."""
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    with (
        Network(2, ipv4=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2", script=script) as made,
    ):
        made.start_all(network.hosts)
        assert [node.wait(60) for node in made.nodes] == [0, 0], made.said()
        met = made.lines(event="met")
        assert [line["total"] for line in met] == [1, 1], made.said()
        assert {line["master"] for line in met} <= {host.ipv6 for host in network.hosts}


def test_names_may_come_late_and_mean_something_else_at_home(tmp_path):
    """As Debian has it, a machine's name means 127.0.1.1 there, and has an address elsewhere."""
    with (
        Network(2, ipv6=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2", endpoint="meet") as made,
    ):
        first, second = network.hosts
        first.names({})
        second.names({})
        for node in made.start_all(network.hosts):
            made.wait_for(lambda node=node: node.events("agent-started"), "the agents")
        assert not any(node.events("joined") for node in made.nodes)
        second.names({"meet": [first.ipv4], "host1": [first.ipv4], "host2": ["127.0.1.1"]})
        first.names({"meet": ["127.0.1.1"], "host1": ["127.0.1.1"], "host2": [second.ipv4]})
        assert masters(made) <= {first.ipv4, second.ipv4}


def test_a_node_where_the_hosts_name_means_another_agent_joins_at_the_hosts_address(tmp_path):
    """It asks the second node, which knows the host as `meet`; here that is the second node."""
    with (
        Network(3, ipv6=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2:3", endpoint="meet") as made,
    ):
        first, second, third = network.hosts
        known = {host.name: [host.ipv4] for host in network.hosts}
        for host, meant in ((first, first), (second, first), (third, second)):
            host.names({**known, "meet": [meant.ipv4]})
        made.start_all([first, second])
        together = made.wait_steps(size=2)
        made.start_on(third, endpoint="host2")
        made.wait_steps(size=3, after=together)


def test_the_user_may_say_which_address_others_reach(tmp_path):
    with (
        Network(2, ipv6=False) as network,
        network_job(tmp_path / "job", network, "--nnodes=2") as made,
    ):
        others = ["10.77.0.101", "10.77.0.102"]
        for host, address in zip(network.hosts, others, strict=True):
            host.run(["ip", "addr", "add", f"{address}/24", "dev", "eth0"])
            made.start_on(host, f"--local-addr={address}")
        assert masters(made) <= set(others)


# --- random cuts: a failure names its seed -------------------------------------------------------


@pytest.mark.needs("etcd")
@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "store"), [("train", "etcd"), ("keep", "embedded")])
def test_two_cuts(tmp_path, mode, store):
    chaos_cuts.run(tmp_path, 1, count=2, mode=mode, store=store)


@pytest.mark.needs("etcd")
@pytest.mark.timeout(900)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 2 + SOAK))
def test_six_cuts(tmp_path, seed):
    chaos_cuts.run(tmp_path, seed)


# --- a connection to torch's store that only its own end still has -------------------------------

STORE = """
import time
from torchelastic.worker import worker_stores
store = worker_stores.serve()
print(store.port, flush=True)
time.sleep(600)
"""
WORKER = """
from torchelastic.worker import bootstrap
bootstrap.attach()
import torch.distributed
torch.distributed.init_process_group("gloo")
"""


def is_connected(pid: int, port: int) -> bool:
    """Whether a process of this network namespace has a connection to the store."""
    text = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for row in text.splitlines()]
    return any(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.slow
@pytest.mark.needs("namespaces")
@pytest.mark.timeout(300)
def test_worker_whose_store_connection_was_reset_at_the_other_end_stops_waiting(tmp_path):
    """Two processes import torch. When the store ends, the network resets its connection in the
    worker's name, as a firewall does; the worker's machine hears nothing of that."""
    env = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    said = tmp_path / "said"
    with Network(2, ipv6=False) as network, said.open("wb") as file, ExitStack() as started:
        there, here = network.hosts

        def start(host: Host, code: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", code]
            process = started.enter_context(host.popen(command, stdout=file, stderr=file, env=env))
            started.callback(process.kill)
            return process

        store = start(there, STORE)
        port = int(poll_for(said.read_text, what="the store"))
        env |= {"MASTER_ADDR": there.address, "MASTER_PORT": str(port)}
        worker = start(here, WORKER)
        poll_for(
            lambda: is_connected(worker.pid, port), what="the worker at the store", timeout=120
        )
        network.cut([there], [here], how="reset", one_way=True)
        store.kill()
        store.wait()
        network.heal()
        assert worker.wait(60) == 1, said.read_text()
    assert "DistNetworkError" in said.read_text()
