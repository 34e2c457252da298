"""Ports for tests: each process of tests takes them from a block that no other process uses.

They lie below the range from which the kernel gives a port to whoever connects, so a port that is
free when a test asks is free when its server, started later, listens.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from functools import cache
from pathlib import Path

_FIRST, _LAST, _SIZE = 10_000, 32_000, 500


def free_port() -> int:
    """A port of this machine that nobody listens at, and that is handed out once."""
    while True:
        port = next(_block())
        with socket.socket() as probe:
            # Connections that a test before has closed do not matter, as for servers.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@cache
def _block() -> itertools.cycle[int]:
    """The ports of a block whose lock this process holds until it ends."""
    directory = Path(tempfile.gettempdir()) / f"torchelastic-test-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    for first in range(_FIRST, _LAST, _SIZE):
        lock = os.open(directory / str(first), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return itertools.cycle(range(first, first + _SIZE))
    raise RuntimeError(f"All blocks of ports are locked: see {directory}.")
