"""Trains in steps of a known length until it is told to stop; some workers are slow on purpose.

    paced.py LINES ORDERS [key=value ...]

Keys: way (train: inside `torchelastic.train`; script: with DDP of its own and `commit()`); pause,
seconds in each step; slow, the rank, or any, that takes `more` seconds more from the step `since`
on, until the order `well`. The order `stop` ends the training.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_side import GENERATION, KEYS, is_ordered, write

import torchelastic
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

PAUSE, MORE, SINCE = (float(KEYS.get(key, "0")) for key in ("pause", "more", "since"))

torch.manual_seed(5)
torch.set_num_threads(1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = torchelastic.TorchState(model=model, optimizer=optimizer)


def pace(step: int, rank: int) -> None:
    """The duration of this worker's own part of a step."""
    is_slow = KEYS.get("slow") in (str(rank), "any") and step >= SINCE
    time.sleep(PAUSE + MORE * (is_slow and not is_ordered("well")))


def learn(network: nn.Module, rank: int) -> None:
    optimizer.zero_grad()
    network(torch.full((3, 4), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def tell(step: int, rank: int, generation: int) -> None:
    write("step", step=step, rank=rank, generation=generation)


def train_step(state: torchelastic.TorchState) -> None:
    if is_ordered("stop"):
        raise StopIteration
    here = session.current()
    pace(state.step, here.rank)
    learn(state.model, here.rank)
    tell(state.step, here.rank, here.generation)


def run_script(network: nn.Module) -> None:
    rank = dist.get_rank()
    kept.restore()
    goes_on = torch.ones(1)
    while True:
        if rank == 0 and is_ordered("stop"):
            goes_on.zero_()
        dist.broadcast(goes_on, src=0)
        if not goes_on.item():
            break
        pace(kept.step, rank)
        learn(network, rank)
        tell(kept.step, rank, GENERATION)
        kept.commit()


if KEYS["way"] == "train":
    torchelastic.train(CoordinatorP2P(), train_step, kept)
else:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    run_script(wrapped)
    dist.barrier()
    dist.destroy_process_group()
