"""A worker that reports metrics: `reporting.py LINES ORDERS way=WAY [store=PATH]`.

WAY is `script`, a plain script: it fails in its first generation, then goes on until the order
`finish`; or `train`, in-process, for three steps of 8 samples, each in a checkpoint.
"""

from __future__ import annotations

import math
import os
import sys

from worker_side import GENERATION, KEYS, RANK, wait_for_order

from torchelastic import metrics


def run_script() -> None:
    metrics.put_metric("loss", 10.0 * GENERATION + RANK)
    metrics.put_metric('acc"ura\ncy', 0.5, "my_app")
    if RANK == 1:
        metrics.put_metric("only one has it", math.nan)
    tell_in_a_child()
    if GENERATION == 0:
        sys.exit(3)
    wait_for_order("finish")


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


if KEYS["way"] == "script":
    run_script()
else:
    train(KEYS["store"])
