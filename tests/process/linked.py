"""Workers that notice each other's end, as gloo's do: `linked.py LINES ORDERS`. Imports no torch.

Every rank has a connection to rank 0. Who finds one closed says so in gloo's words. Orders are
files named after the generation and the rank, as `obedient.py` has them.
"""

import atexit
import os
import signal
import socket
import sys
import time
from pathlib import Path

from worker_side import GENERATION, HERE, ORDERS, RANK, SIZE, wait_for_order, write

address = f"\0torchelastic-test-{os.environ['MASTER_PORT']}-{GENERATION}"


def links() -> list[socket.socket]:
    if RANK == 0:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            return [listening.accept()[0] for _ in range(SIZE - 1)]
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(address)
        except ConnectionRefusedError:
            link.close()
            time.sleep(0.01)
        else:
            return [link]


def check(link: socket.socket) -> None:
    try:
        if link.recv(1, socket.MSG_DONTWAIT):
            return
    except BlockingIOError:
        return
    except ConnectionError:
        pass
    where = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534"
    raise RuntimeError(f"[{where}] Connection closed by peer [127.0.0.1]:4711")


def die_slowly() -> None:
    """Close the connection first; the process itself takes its time."""
    for link in linked:
        link.close()
    wait_for_order("release")


def eat() -> None:
    """Take memory until somebody minds; of all processes, this one is to pay for it."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    food = []
    while True:
        food.append(b"1" * (1 << 20))


def obey(what: str, value: str) -> None:
    if what == "raise":
        raise ValueError(value)
    if what == "raise-slowly":
        atexit.register(die_slowly)
        raise ValueError(value)
    if what == "eat":
        eat()
    if what == "finish":
        sys.exit(0)


# A peer's end is to be noticed, whoever orders what meanwhile.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("linking", flush=True)
linked = links()
print("linked", flush=True)
write("start", **HERE)
while True:
    for name in (f"{GENERATION}-{RANK}", f"{GENERATION}-any", "any-any"):
        if (ORDERS / name).exists():
            obey(*(ORDERS / name).read_text().partition(" ")[::2])
    for link in linked:
        check(link)
    time.sleep(0.01)
