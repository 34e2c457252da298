"""A worker that makes steps with the others of its world, over the network.

    rounds.py LINES PLACES [raises=1]

In a step all send a byte to rank 0, which answers all. Imports no torch. Who lost a peer makes
no more steps, and waits for its agent to end it; with `raises`, it ends with the error, as with
torch. SIGTERM ends none with a file PLACES/stays-PID.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

lines, places = map(Path, sys.argv[1:3])
rank, size, generation = (
    int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
)
master = os.environ["MASTER_ADDR"]
#: Says where rank 0 listens.
place = places / f"{generation}-{master}-{os.environ['MASTER_PORT']}"
out = open(lines / f"{generation}-{rank}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115


def end(signum: int, frame: object) -> None:
    if not (places / f"stays-{os.getpid()}").exists():
        sys.exit(128 + signum)


signal.signal(signal.SIGTERM, end)


def meet() -> list[socket.socket]:
    """Connections to those a step is made with: all, for rank 0, and rank 0, for all others."""
    if rank > 0:
        while not place.exists():
            time.sleep(0.01)
        host, port = place.read_text().split()
        return [socket.create_connection((host, int(port)))]
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    place.with_suffix(".part").write_text(f"{os.uname().nodename} {listener.getsockname()[1]}")
    place.with_suffix(".part").rename(place)
    return [listener.accept()[0] for _ in range(size - 1)]


def exchange(peers: list[socket.socket]) -> None:
    for send in (rank > 0, rank == 0):
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
        told = {"generation": generation, "rank": rank, "size": size, "step": step}
        told |= {"entered": entered, "pid": os.getpid(), "master": master}
        out.write(json.dumps({"event": "step", **told}) + "\n")
        step += 1


try:
    train()
except OSError:
    if "raises=1" in sys.argv[3:]:
        raise
    while True:  # a SIGTERM that comes just before a sleep is noticed after it
        time.sleep(0.1)
