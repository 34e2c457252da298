"""Bytes that the TCP connections of this process have carried, as the kernel counts them.

Counted there, nothing that a protocol does can be left out: neither another connection nor what
travels below it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

#: Where `struct tcp_info` has tcpi_bytes_acked and tcpi_bytes_received.
_COUNTERS = struct.Struct("=120xQQ")


@dataclass(frozen=True)
class Bytes:
    """Payload of one connection or of many."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent - other.sent, self.received - other.received)


def by_connection() -> dict[str, Bytes]:
    """What each open TCP connection of this process has carried so far."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = os.readlink(f"/proc/self/fd/{name}")
            if connection.startswith("socket:"):
                found[connection] = _carried(int(name))
        except OSError:
            continue  # closed meanwhile, or no TCP
    return found


def since(before: Mapping[str, Bytes]) -> Bytes:
    """What the connections that are open now have carried since they were last looked at."""
    carried = (now - before.get(name, Bytes()) for name, now in by_connection().items())
    return sum(carried, Bytes())


def _carried(descriptor: int) -> Bytes:
    borrowed = socket.socket(fileno=descriptor)
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
    finally:
        borrowed.detach()
    return Bytes(*_COUNTERS.unpack(info))
