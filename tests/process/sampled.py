"""An in-process worker that takes its samples from an elastic loader, and writes down which.

    sampled.py LINES ORDERS ledger=DIRECTORY [key=value ...]

Keys: samples, batch, epochs, workers (loading processes), stream (1: an ElasticStream), full (a
smaller world takes its time, so that it does not come to the end without the others), held (1:
until the order `hurry` all worlds take their time).
"""

from __future__ import annotations

import time

import torch
import worker_side
from worker_side import is_ordered, write

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, ElasticStream, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

given = dict(worker_side.KEYS)
ledger = Ledger(given.pop("ledger"))
KEYS = {"samples": 100, "batch": 7, "epochs": 2, "workers": 1, "stream": 0, "full": 0, "held": 0}
KEYS |= {name: int(value) for name, value in given.items()}
#: Of a stream: shards of unequal lengths.
SHARD = 13

torch.manual_seed(5)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)


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
    if KEYS["held"] and not is_ordered("hurry"):
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


state = torchelastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, ledger=ledger)
torchelastic.train(CoordinatorP2P(), train_step, state)
write("done", step=state.step, state=sampler.state_dict())
