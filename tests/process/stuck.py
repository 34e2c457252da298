"""Ranks that get stuck on order.

    stuck.py LINES ORDERS HOW

HOW is `resident` (torchelastic.train) or `kept` (a script that commits). The order `sleep` makes
rank 1 sleep, in the first generation, instead of entering the all-reduce of its step, the order
`other` makes it call a broadcast there, in the second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchelastic
from torchelastic.p2p import CoordinatorP2P

LINES, ORDERS, HOW = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = torchelastic.TorchState(model=model, optimizer=optimizer)
lines = open(LINES / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115


def write(event: str, **more: object) -> None:
    rank, generation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    said = {"event": event, "pid": os.getpid(), "rank": rank, "generation": generation, **more}
    lines.write(json.dumps(said) + "\n")


def sleep_for_ever() -> None:
    time.sleep(3600)


def step() -> None:
    time.sleep(0.01)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if dist.get_rank() == 1 and generation == 0 and (ORDERS / "sleep").exists():
        sleep_for_ever()
    if dist.get_rank() == 1 and generation == 1 and (ORDERS / "other").exists():
        dist.broadcast(torch.zeros(1), src=0)
    dist.all_reduce(torch.zeros(1))


def train_step(state: torchelastic.TorchState) -> None:
    step()
    write("step", step=state.step)
    if (ORDERS / "finish").exists():
        raise StopIteration


def run_script() -> None:
    dist.init_process_group("gloo")
    kept.restore()
    number = 0
    done = torch.zeros(1)
    while not done:
        step()
        write("step", step=number)
        number += 1
        kept.commit()
        done.fill_((ORDERS / "finish").exists())
        dist.all_reduce(done)


if HOW == "resident":
    torchelastic.train(CoordinatorP2P(), train_step, kept)
else:
    run_script()
