"""An in-process worker that takes its samples from an elastic loader, and writes down which.

    sampled.py LINES ORDERS LEDGER [key=value ...]

Keys: samples, batch, epochs, workers (loading processes), stream (1: an ElasticStream), full (a
smaller world takes its time, so that it does not come to the end without the others), held (1:
until the order `hurry` all worlds take their time).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, ElasticStream, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

LINES, ORDERS, LEDGER = map(Path, sys.argv[1:4])
KEYS = {"samples": 100, "batch": 7, "epochs": 2, "workers": 1, "stream": 0, "full": 0, "held": 0}
KEYS |= {name: int(value) for name, value in (text.split("=") for text in sys.argv[4:])}
#: Of a stream: shards of unequal lengths.
SHARD = 13

torch.manual_seed(5)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
lines = open(LINES / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115


def write(event: str, **more) -> None:
    lines.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\n")


def read(shard: int, first: int) -> range:
    begin = shard * SHARD
    return range(begin + first, min(begin + SHARD, KEYS["samples"]))


if KEYS["stream"]:
    sampler = dataset = ElasticStream(read, -(-KEYS["samples"] // SHARD), window=10)
else:
    dataset, sampler = range(KEYS["samples"]), ElasticSampler(KEYS["samples"])
loader = DataLoader(
    dataset,
    sampler=None if KEYS["stream"] else sampler,
    policy=BatchPolicy.constant_global(KEYS["batch"]),
    num_workers=KEYS["workers"],
    persistent_workers=KEYS["workers"] > 0,
)
#: Kept over all worlds.
batches = iter(loader)


def take(state) -> torch.Tensor:
    """The next batch; after the last epoch StopIteration, which ends the training."""
    global batches
    try:
        return next(batches)
    except StopIteration:
        if state.sampler.epoch >= KEYS["epochs"]:
            raise
        batches = iter(loader)
        return next(batches)


def pace(size: int) -> float:
    """Seconds of a step."""
    if KEYS["held"] and not (ORDERS / "hurry").exists():
        return 0.5
    return 0.01 if size >= KEYS["full"] else 0.3


def train_step(state) -> None:
    here = session.current()
    batch = take(state)
    who = {"step": state.step, "rank": here.rank, "generation": here.generation}
    samples = batch.tolist() if loader.weight else []
    write("took", size=here.size, epoch=loader.handed.epoch, samples=samples, **who)
    time.sleep(pace(here.size))
    loss = state.model(batch.float()[:, None]).square().mean() * loader.weight
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    write("finished", weights=[one.item() for one in model.parameters()], **who)


state = torchelastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, ledger=Ledger(LEDGER)
)
torchelastic.train(CoordinatorP2P(), train_step, state)
write("done", step=state.step, state=sampler.state_dict())
