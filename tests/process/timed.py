"""A worker that hangs in a timed block: timed.py HOW [GENERATION]."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time

from torchelastic.timer import expires

#: Far longer than any test waits.
LONG = 600


def in_python() -> None:
    """The inner block has ended, the outer one does not."""
    with expires(after=0.3, scope="outer"):
        with expires(after=LONG, scope="inner"):
            pass
        time.sleep(LONG)


def holding_the_gil() -> None:
    """In C, and no other thread of the worker can run."""
    sleep = ctypes.PyDLL(None).sleep
    with expires(after=0.3):
        sleep(LONG)


def in_a_thread() -> None:
    def wait_for_data() -> None:
        with expires(after=0.3, scope="data"):
            threading.Event().wait()

    with expires(after=LONG, scope="main"):
        thread = threading.Thread(target=wait_for_data)
        thread.start()
        thread.join()


def by_torchs_client() -> None:
    """The line that torch's `FileTimerClient` writes, without importing torch."""
    ask = {"version": 1, "pid": os.getpid(), "scope_id": "torch's", "signal": 9}
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
        print(json.dumps(ask | {"expiration_time": time.time() + 0.3}), file=pipe)
    time.sleep(LONG)


def many() -> None:
    """Blocks that end in time, nested, overlapping and one by one."""
    with contextlib.ExitStack() as blocks:
        for number in range(100):
            blocks.enter_context(expires(after=LONG, scope=f"block {number}"))
    for _ in range(100):
        with expires(after=LONG):
            pass


def script() -> None:
    """Hangs in every generation, each time in another way."""
    many()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (in_python, in_a_thread, by_torchs_client, holding_the_gil)[generation]()


def train() -> None:
    """Rank 0 hangs in a step, once; it is replaced, and the training goes on."""
    import torch

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P
    from torchelastic.training import session

    model = torch.nn.Linear(4, 1)
    kept = torchelastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))

    def step(state) -> None:
        here = session.current()
        if state.step == 6:
            raise StopIteration
        if state.step == 3 and here.rank == 0 and here.generation == int(sys.argv[2]):
            with expires(after=0.3, scope="slow step"):
                ctypes.PyDLL(None).sleep(LONG)
        with expires(after=LONG, scope="step"):
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 4)).mean().backward()
            state.optimizer.step()

    state = torchelastic.train(CoordinatorP2P(), step, kept)
    print(f"trained {state.step} steps", flush=True)


globals()[sys.argv[1]]()
