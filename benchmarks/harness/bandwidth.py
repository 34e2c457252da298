"""How fast bytes cross a plain socket here: what any transfer of state is held against."""

from __future__ import annotations

import mmap
import os
import socket
import time

from benchmarks.harness.summary import summarize

MEGABYTE = 1_000_000
COPIES = 5


def socket_bandwidth(size: int = 200 * MEGABYTE) -> float:
    """Bytes per second from one process to another over loopback; the median of a few copies."""
    return size / summarize([copy_seconds(size) for _ in range(COPIES)]).median


def copy_seconds(size: int, *, fresh: bool = False) -> float:
    """Seconds to copy `size` bytes of one process into memory of another.

    If that memory is `fresh`, its pages have yet to be made.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        child = os.fork()
        if not child:
            _send(address, size)
        try:
            return _receive(server, mmap.mmap(-1, size) if fresh else bytearray(size))
        finally:
            os.waitpid(child, 0)


def _send(address: tuple[str, int], size: int) -> None:
    """The child: never returns."""
    status = 1
    try:
        data = b"." * size  # zeros would be one and the same page over and over
        with socket.create_connection(address) as connection:
            connection.sendall(data)
        status = 0
    finally:
        os._exit(status)


def _receive(server: socket.socket, into: bytearray | mmap.mmap) -> float:
    connection, _ = server.accept()
    with connection, memoryview(into) as left:
        began = time.monotonic()
        got = 0
        while got < len(into):
            count = connection.recv_into(left[got:])
            if not count:
                raise ConnectionError("the copy ended early")
            got += count
        return time.monotonic() - began
