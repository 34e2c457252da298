"""A worker that makes steps with the others of its world, over the network.

    rounds.py LINES ORDERS [raises=1]

In a step all send a byte to rank 0, which answers all. Imports no torch. Who lost a peer makes
no more steps, and waits for its agent to end it; with `raises`, it ends with the error, as with
torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from worker_side import GENERATION, KEYS, ORDERS, RANK, SIZE, write

master = os.environ["MASTER_ADDR"]
#: Says where rank 0 listens.
place = ORDERS / f"{GENERATION}-{master}-{os.environ['MASTER_PORT']}"


def end(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


signal.signal(signal.SIGTERM, end)


def meet() -> list[socket.socket]:
    """Connections to those a step is made with: all, for rank 0, and rank 0, for all others."""
    if RANK > 0:
        while not place.exists():
            time.sleep(0.01)
        host, port = place.read_text().split()
        return [socket.create_connection((host, int(port)))]
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    place.with_suffix(".part").write_text(f"{os.uname().nodename} {listener.getsockname()[1]}")
    place.with_suffix(".part").rename(place)
    return [listener.accept()[0] for _ in range(SIZE - 1)]


def exchange(peers: list[socket.socket]) -> None:
    for send in (RANK > 0, RANK == 0):
        for peer in peers:
            if send:
                peer.sendall(b"x")
            elif not peer.recv(1):
                raise ConnectionError("Connection closed by peer")  # as gloo says it


def train() -> None:
    peers, step = meet(), 0
    while True:
        entered = time.monotonic()
        time.sleep(0.05)
        exchange(peers)
        who = {"generation": GENERATION, "rank": RANK, "size": SIZE, "step": step}
        write("step", **who, entered=entered, master=master)
        step += 1


try:
    train()
except OSError:
    if "raises" in KEYS:
        raise
    while True:  # a SIGTERM that comes just before a sleep is noticed after it
        time.sleep(0.1)
