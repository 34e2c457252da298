"""Train for a while, and flip bits of one worker's state after given steps: see `guard.py`.

flip_train.py OUT key=value ...: steps, every (steps between two checks), wait (seconds of a step),
flips (how many), seed, workers.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler
from torchelastic.p2p import CoordinatorP2P

OUT = Path(sys.argv[1])
KEYS = {"every": 5, "wait": 0.02, "flips": 50, "seed": 0, "workers": 3, "apart": 30}
KEYS |= {name: type(KEYS[name])(value) for name, value in (one.split("=") for one in sys.argv[2:])}
STEPS = (KEYS["flips"] + 1) * KEYS["apart"]

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
sampler = ElasticSampler(len(data), seed=3)
policy = BatchPolicy.fixed(micro=4, count=6)
loader = DataLoader(data, sampler=sampler, policy=policy)
guard = torchelastic.Guard(check_every=KEYS["every"])
state = torchelastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, policy=policy, guard=guard
)
batches = iter(loader)


def next_batch() -> torch.Tensor:
    global batches
    while True:
        try:
            return next(batches)
        except StopIteration:
            batches = iter(loader)


def note(event: str, **facts: object) -> None:
    """Append a line with the time to this worker's file."""
    line = {"event": event, "at": time.monotonic(), "rank": int(os.environ["RANK"]), **facts}
    line["size"] = int(os.environ["WORLD_SIZE"])
    with (OUT / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def flip(step: int) -> None:
    """Flip a bit of this worker's state, or the same bit of two elements, once for each number."""
    number, offset = divmod(step, KEYS["apart"])
    choice = random.Random(f"{KEYS['seed']} {number}")
    at, rank = choice.randrange(1, 10), choice.randrange(KEYS["workers"])
    done = OUT / f"flip-{number}"
    if not 0 < number <= KEYS["flips"] or offset != at or int(os.environ["RANK"]) != rank:
        return
    if done.exists() or int(os.environ["WORLD_SIZE"]) != KEYS["workers"]:
        return
    kept = [one for held in optimizer.state.values() for one in held.values() if one.numel() > 1]
    tensor = choice.choice([*model.parameters(), *kept]).detach().view(-1).view(torch.int32)
    bit = choice.randrange(31)
    elements = choice.sample(range(len(tensor)), 1 + number % 2)
    done.touch()
    note("flip", number=number, step=step, bit=bit, count=len(elements))
    tensor[elements] ^= 1 << bit


def train_step(state: torchelastic.TorchState) -> None:
    step = state.step
    if step == STEPS:
        raise StopIteration
    batch = next_batch()
    time.sleep(KEYS["wait"])
    optimizer.zero_grad()
    for micro in policy.accumulate(batch, model, total=loader.total):
        micro.backward(model(micro.data).pow(2).mean())
    optimizer.step()
    note("step", step=step)
    flip(step)


torchelastic.train(CoordinatorP2P(), train_step, state)
note("done", digest=state.digest())
