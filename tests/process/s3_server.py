"""A real S3 server (moto's), over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.support import poll_for

#: A process that writes lets all others go first: on a busy machine its imports take minutes.
PATIENCE = 600.0


@contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """Its address, while it runs."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        poll_for(lambda: answers(port), what="the S3 server", timeout=PATIENCE)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
