"""Voters: agents started again on their machines, and a witness beside two nodes."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.netns import Network
from tests.process.jobs import job
from tests.process.network_jobs import check_one_world_at_a_time, network_job
from tests.process.s3 import s3_server
from tests.support import poll_for

FLAGS = "--nnodes=1:2 --settle=60 --lease=2 --no-zygote"


def test_two_of_three_agents_are_killed_and_started_again(tmp_path):
    """First two that follow, then the host and another: each time one alone is no majority."""
    with job(tmp_path / "job", "--nnodes=3 --lease=2 --settle=60") as made:
        nodes = [made.start() for _ in range(3)]
        generation = made.begun(3)
        for lost in ((1, 2), (0, 1)):
            for index in lost:
                nodes[index].kill()
            for index in lost:
                nodes[index] = made.start()
            generation = made.begun(3, generation)
        made.order("finish")
        assert [node.wait() for node in nodes] == [0, 0, 0], made.said()
    assert not list(tmp_path.rglob("voter")), "a closed job is not resumed"


def test_host_of_two_nodes_is_lost_and_the_witness_votes_for_the_other(tmp_path):
    """The witness's keys go with the job."""
    with job(tmp_path / "job", f"{FLAGS} --witness={tmp_path}/witness") as it:
        host, left = it.start(), it.start()
        it.world(0, 2)
        host.kill()
        it.begun(1, after=0)
        claimed = tmp_path / "witness" / f"job{it.port}" / "0" / "after-0"
        assert json.loads(claimed.read_text())["term"] >= 3
        it.order("finish")
        assert left.wait() == 0, left.stderr
        assert not claimed.exists()
        marker = tmp_path / "witness" / f"job{it.port}" / "incarnation-0"
        assert json.loads(marker.read_text())["closed"]


@pytest.mark.slow
def test_a_job_that_was_killed_while_it_started_starts_again(tmp_path, monkeypatch):
    """Two nodes are needed: the first had no world when it was killed, its files included."""
    with job(tmp_path / "job", f"--nnodes=2 --lease=1 --witness={tmp_path}/witness") as it:
        for name in ("first", "second"):
            (tmp_path / name).mkdir(mode=0o700)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / name))
            node = it.start()
            poll_for(lambda node=node: node.events("joined"), what="the node hosts")
            if name == "first":
                node.kill()
        other = it.start()
        it.world(0, 2)
        it.order("finish")
        assert [node.wait(), other.wait()] == [0, 0], it.said()
    markers = sorted((tmp_path / "witness" / f"job{it.port}").iterdir())
    assert [json.loads(one.read_text())["closed"] for one in markers] == [True, True]


@pytest.mark.needs("namespaces")
@pytest.mark.timeout(300)
def test_a_cut_between_two_nodes_never_makes_two_jobs(tmp_path):
    """Both sides lose the other when a lease of two seconds ends, and both ask the witness."""
    flags = f"--nnodes=1:2 --settle=0.5 --lease=2 --witness={tmp_path}/witness"
    with Network(2) as network, network_job(tmp_path / "job", network, flags) as made:
        first = made.start_on(network.hosts[0])
        made.wait_for(lambda: first.events("joined"), "the first node hosts")
        made.start_on(network.hosts[1])
        before = made.wait_steps(size=2)
        for how in ("drop", "reset"):
            network.cut(network.hosts[:1], network.hosts[1:], how=how)
            apart = made.wait_steps(size=1, after=before)
            network.heal()
            before = made.wait_steps(size=2, after=apart)
        check_one_world_at_a_time(made)


@pytest.mark.slow
@pytest.mark.needs("moto", "s3fs")
@pytest.mark.timeout(900)
def test_the_witness_may_be_an_s3_bucket(tmp_path, monkeypatch):
    """The server and each node's process that asks it import what takes seconds."""
    with (
        s3_server(tmp_path) as endpoint,
        job(tmp_path / "job", f"{FLAGS} --witness=s3://witness/jobs") as it,
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/witness", method="PUT")).close()
        host, other = it.start(), it.start()
        it.world(0, 2, timeout=300.0)
        host.kill()
        it.begun(1, after=0, timeout=300.0)
        assert "/0/after-0" in listing(endpoint)
        it.order("finish")
        assert other.wait() == 0, other.stderr
        assert "/0/after-0" not in listing(endpoint)


def listing(endpoint: str) -> str:
    with urllib.request.urlopen(f"{endpoint}/witness?list-type=2") as found:
        return found.read().decode()
