"""A worker of a world of two whose agent is the test.

Rank 1 has data for three steps. Rank 0 has more, and stays in its third step, after the step's
collective, until the flag is there.
"""

import socket
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchelastic
from tests.support import poll_for
from tests.unit.training.fake_agent import Coordinator


class Sum(torchelastic.State):
    def __init__(self) -> None:
        self.step, self.total = 0, 0

    def sync(self) -> None:
        mine = torch.tensor([self.step, self.total])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        self.step, self.total = mine.tolist()

    def snapshot(self) -> Any:
        return self.step, self.total

    def apply(self, snapshot: Any) -> None:
        self.step, self.total = snapshot


def train_step(flag: Path, state: Sum) -> None:
    if dist.get_rank() == 1 and state.step == 3:
        raise StopIteration
    state.step += 1
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if dist.get_rank() == 0 and state.step == 3:
        poll_for(flag.exists, what="the flag")
    state.total += int(ones.item())


def work(end: socket.socket, flag: Path) -> None:
    torch.set_num_threads(1)
    final = torchelastic.train(Coordinator(end), partial(train_step, flag), Sum())
    assert (final.step, final.total) == (3, 6)
