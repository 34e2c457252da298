"""How fast bytes cross a plain socket here: what any transfer of state is held against."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Sequence

from benchmarks.harness.summary import summarize

MEGABYTE = 1_000_000
COPIES = 5


def socket_bandwidth(size: int = 200 * MEGABYTE) -> float:
    """Bytes per second from one process to another over loopback; the median of a few copies."""
    return size / summarize([copy_seconds(size) for _ in range(COPIES)]).median


def copy_seconds(size: int, *, new: float = 0.0) -> float:
    """Seconds to copy `size` bytes of one process into memory of another.

    Of that memory a part is `new`: its pages have yet to be made.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        child = os.fork()
        if not child:
            _send(address, size)
        try:
            # Made after the fork: pages that are shared with a child are copied at the first write.
            return _receive(server, _rooms(size, int(new * size)))
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


def _rooms(size: int, fresh: int) -> list[bytearray | mmap.mmap]:
    known = bytearray(size - fresh)
    return [known, mmap.mmap(-1, fresh)] if fresh else [known]


def _receive(server: socket.socket, rooms: Sequence[bytearray | mmap.mmap]) -> float:
    connection, _ = server.accept()
    with connection:
        began = time.monotonic()
        for room in rooms:
            _fill(connection, room)
        return time.monotonic() - began


def _fill(connection: socket.socket, room: bytearray | mmap.mmap) -> None:
    with memoryview(room) as left:
        got = 0
        while got < len(room):
            count = connection.recv_into(left[got:])
            if not count:
                raise ConnectionError("the copy ended early")
            got += count
