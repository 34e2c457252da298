"""Ranks that get stuck on order.

    stuck.py LINES ORDERS

The order `sleep` makes rank 1 sleep, in the first generation, instead of entering the all-reduce of
its step, the order `other` makes it call a broadcast there, in the second.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from worker_side import is_ordered, write

import torchelastic
from torchelastic.p2p import CoordinatorP2P

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = torchelastic.TorchState(model=model, optimizer=optimizer)


def generation() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def sleep_for_ever() -> None:
    time.sleep(3600)


def step() -> None:
    time.sleep(0.01)
    if dist.get_rank() == 1 and generation() == 0 and is_ordered("sleep"):
        sleep_for_ever()
    if dist.get_rank() == 1 and generation() == 1 and is_ordered("other"):
        dist.broadcast(torch.zeros(1), src=0)
    dist.all_reduce(torch.zeros(1))


def train_step(state: torchelastic.TorchState) -> None:
    step()
    write("step", step=state.step, rank=dist.get_rank(), generation=generation())
    if is_ordered("finish"):
        raise StopIteration


torchelastic.train(CoordinatorP2P(), train_step, kept)
