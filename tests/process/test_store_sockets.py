"""A worker's connection to torch's store that only its own end still has."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.netns import Host, Network
from tests.support import poll_for

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
