"""Checkpoints at a real S3 server (moto's), over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.support import poll_for

SCRIPT = Path(__file__).with_name("s3_store.py")
#: A process that writes lets all others go first: on a busy machine its imports take minutes.
PATIENCE = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]


@pytest.fixture
def endpoint(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        poll_for(lambda: answers(port), what="the S3 server", timeout=PATIENCE)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(900)
def test_checkpoints_at_an_s3_server(endpoint):
    """The server, the script and the process that writes import what takes seconds."""
    command = [sys.executable, str(SCRIPT), endpoint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
