"""An in-process worker: a small model with all that is easily lost, and a line per committed step.

    resident.py LINES ORDERS [key=value ...]

Lines and orders as `obedient.py` has them. Keys: steps, model (plain, norm, wide: another one),
ends (rank:step, where the data of one rank ends early), slow (seconds in each step), evaluates
(rank:step, after which that rank evaluates for ten minutes), url (of a job without a launcher).
"""

from __future__ import annotations

import hashlib
import os
import random
import time

import torch
from torch import nn
from worker_side import KEYS, ORDERS, is_ordered, write

import torchelastic
from torchelastic import faults
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

STEPS = int(KEYS.get("steps", "12"))

torch.manual_seed(5)
random.seed(5)


class HalfAdam(torch.optim.Adam):
    """Passes a fault point after half of its parameters are written."""

    def step(self, closure=None):
        group = self.param_groups[0]
        parameters = group["params"]
        middle = len(parameters) // 2
        try:
            group["params"] = parameters[:middle]
            super().step()
            faults.at("optimizer.inside")
            group["params"] = parameters[middle:]
            super().step()
        finally:
            group["params"] = parameters


def make_model() -> nn.Module:
    if KEYS.get("model") == "plain":
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    width = 64 if is_wide() else 32
    return nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4)
    )


def is_wide() -> bool:
    """Also if an order says so, to those who start from then on."""
    return KEYS.get("model") == "wide" or is_ordered("wide")


model = make_model()
optimizer = HalfAdam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)


def fingerprint() -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def obey(step: int, rank: int) -> None:
    """Orders are files named after the step and the rank."""
    for name in (f"{step}-{rank}", f"any-{rank}"):
        path = ORDERS / name
        if path.exists():
            what, _, value = path.read_text().partition(" ")
            if what == "raise":
                raise ValueError(value)
            if what == "raise-once":
                path.unlink()
                raise ValueError(value)
            if what == "fatal":
                raise torchelastic.NonRetryableException(value)
            if what == "exit":
                os._exit(int(value))
            if what == "finish":
                raise StopIteration


def train_step(state) -> None:
    here = session.current()
    step = state.step
    ends = dict(item.split(":") for item in KEYS.get("ends", "").split(",") if item)
    if step >= int(ends.get(str(here.rank), STEPS)):
        raise StopIteration
    entered = time.monotonic()
    who = {"step": step, "rank": here.rank, "size": here.size, "generation": here.generation}
    write("enter", **who)
    time.sleep(float(KEYS.get("slow", "0")))
    obey(step, here.rank)
    batch = (
        torch.randn(6, 16, generator=torch.Generator().manual_seed(1000 * step + here.rank))
        * random.random()
    )
    state.optimizer.zero_grad()
    loss = state.model(batch).square().mean()
    loss.backward()
    state.optimizer.step()
    state.scheduler.step()
    write("step", **who, hash=fingerprint(), entered=entered, at=time.monotonic())
    if KEYS.get("evaluates") == f"{here.rank}:{step}":
        with session.unhurried():
            time.sleep(600)


kept = torchelastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
write("start")
arguments = ("gloo", KEYS["url"]) if "url" in KEYS else ()
state = torchelastic.train(CoordinatorP2P(*arguments), train_step, kept)
write("done", step=state.step, hash=fingerprint(), lr=optimizer.param_groups[0]["lr"])
