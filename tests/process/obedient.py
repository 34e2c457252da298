"""A worker that does as it is told: `obedient.py LINES ORDERS`. Imports no torch, but a
light one where it is told to train."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

lines, orders = map(Path, sys.argv[1:3])
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = os.environ["RANK"]
out = open(lines / f"{generation}-{rank}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115


def tell(event: str, **more: object) -> None:
    line = {
        "event": event,
        "generation": int(generation),
        "rank": int(rank),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "node_rank": int(os.environ["NODE_RANK"]),
        "pid": os.getpid(),
        "mono": time.monotonic(),
        **more,
    }
    out.write(json.dumps(line) + "\n")


def poll_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


for name in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(name, lambda number, _: tell("signal", signal=number))

contract = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("TORCHELASTIC", "MASTER", "OMP", "TORCH_"))
    or name.endswith(("RANK", "WORLD_SIZE"))
    or name == "ROLE_NAME"
}
tell("start", env=contract)

trained = False
while True:
    for name in (f"{generation}-{rank}", f"{generation}-any", "any-any"):
        path = orders / name
        if not path.exists():
            continue
        what, _, value = path.read_text().partition(" ")
        if what == "raise":
            raise ValueError(value.replace("PID", str(os.getpid())) or "told to")
        if what == "exit":
            sys.exit(int(value))
        if what == "finish":
            tell("finish")
            if value == "slowly":  # Python ends when another order allows it
                threading.Thread(target=poll_for, args=[orders / "end"]).start()
            sys.exit(0)
        if what == "train" and not trained:  # in worlds of no more than so many workers
            if int(os.environ["WORLD_SIZE"]) > int(value):
                raise ValueError(f"the batch cannot be split over {os.environ['WORLD_SIZE']}")
            from torch.optim import SGD

            SGD().step()
            trained = True
            tell("step")
        if what == "ignore-term" and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("ignoring")
    time.sleep(0.01)
