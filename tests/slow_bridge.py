"""A bridge that takes its time and loses packets, for kernels without netem.

    python -m tests.slow_bridge DELAY_SECONDS LOSS_SHARE PORT PORT ...

Each frame that comes in at a port goes out at all others; hosts drop what is not for them. Frames
are carried with the header in which the kernel says what is still to be done to them (segments,
checksums), so veth pairs need no settings.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import selectors
import socket
import sys
import time

SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
#: A segment of the largest size, its headers, and what PACKET_VNET_HDR puts before.
LARGEST = 1 << 17


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def main(delay: float, loss: float, names: list[str]) -> None:
    ports = [open_port(name) for name in names]
    chance = random.Random(5)
    order = itertools.count()
    #: (when it is due, order of arrival, where it came in, the frame)
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    with selectors.DefaultSelector() as selector:
        for port in ports:
            selector.register(port, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            timeout = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
            for key, _ in selector.select(timeout):
                frame = key.fileobj.recv(LARGEST)
                if chance.random() >= loss:
                    due = time.monotonic() + delay
                    heapq.heappush(under_way, (due, next(order), key.fileobj, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, source, frame = heapq.heappop(under_way)
                for port in ports:
                    if port is not source:
                        send(port, frame)


def send(port: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a queue is full or a host is going: one more lost packet
        port.send(frame)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
