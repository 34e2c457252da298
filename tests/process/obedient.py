"""A worker that does as it is told: `obedient.py LINES ORDERS`. Imports no torch, but a
light one where it is told to train."""

import os
import signal
import sys
import threading
import time

from worker_side import GENERATION, HERE, ORDERS, RANK, SIZE, wait_for_order, write


def tell(event: str, **more: object) -> None:
    node_rank = int(os.environ["NODE_RANK"])
    write(event, **HERE, node_rank=node_rank, mono=time.monotonic(), **more)


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
    for name in (f"{GENERATION}-{RANK}", f"{GENERATION}-any", "any-any"):
        path = ORDERS / name
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
                threading.Thread(target=wait_for_order, args=["end"]).start()
            sys.exit(0)
        if what == "train" and not trained:  # in worlds of no more than so many workers
            if int(value) < SIZE:
                raise ValueError(f"the batch cannot be split over {SIZE}")
            from torch.optim import SGD

            SGD().step()
            trained = True
            tell("step")
        if what == "ignore-term" and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("ignoring")
    time.sleep(0.01)
