"""A worker that reports metrics.

reporting.py script ORDERS   a plain script: fails in its first generation, then goes on until
                             the file ORDERS/finish is there
reporting.py train STORE     in-process, for three steps of 8 samples, each in a checkpoint
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

from torchelastic import metrics

RANK = int(os.environ["RANK"])


def run_script(orders: Path) -> None:
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    metrics.put_metric("loss", 10.0 * generation + RANK)
    metrics.put_metric('acc"ura\ncy', 0.5, "my_app")
    if RANK == 1:
        metrics.put_metric("only one has it", math.nan)
    tell_in_a_child()
    if generation == 0:
        sys.exit(3)
    while not (orders / "finish").exists():
        time.sleep(0.01)


def tell_in_a_child() -> None:
    """Whoever a worker starts does not speak for it."""
    child = os.fork()
    if child == 0:
        metrics.put_metric("loss", -1.0)
        os._exit(0)
    os.waitpid(child, 0)


def train(store: str) -> None:
    import torch

    import torchelastic
    from torchelastic import checkpoint
    from torchelastic.data import ElasticSampler
    from torchelastic.p2p import CoordinatorP2P

    checkpoint.set_checkpoint_manager(checkpoint.CheckpointStore(store, every=1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(state):
        if state.step == 3:
            raise StopIteration
        loss = state.model(torch.ones(1, 1)).sum()
        loss.backward()
        state.optimizer.step()
        state.sampler.took(8)
        metrics.put_metric("step", state.step)
        metrics.put_metric("loss", loss)
        return state, torchelastic.SimpleWorkerStats(7.0 + RANK)

    sampler = ElasticSampler(1000)
    state = torchelastic.TorchState(model=model, optimizer=optimizer, sampler=sampler)
    torchelastic.train(CoordinatorP2P(), train_step, state)


if sys.argv[1] == "script":
    run_script(Path(sys.argv[2]))
else:
    train(sys.argv[2])
