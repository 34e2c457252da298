"""A worker that counts: after n steps its sum is 1 + ... + n, in every world, or it has gone wrong.

    counting.py DIRECTORY STEPS [SECONDS [EVERY]]

Takes a step every so many seconds, writes a checkpoint after every fifth one, or every so many, 0:
none, and says what it begins from and ends with.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import torchelastic
import torchelastic.distributed as edist
from torchelastic import checkpoint
from torchelastic.p2p import CoordinatorP2P

DIRECTORY, STEPS = sys.argv[1], int(sys.argv[2])
PAUSE = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
EVERY = int(sys.argv[4]) if len(sys.argv) > 4 else 5


class Counted(torchelastic.State):
    def __init__(self):
        self.sum = self.steps = 0

    def sync(self):
        source, self.steps = edist.all_gather_return_max_long(self.steps)
        self.sum = edist.broadcast_long(self.sum, source)
        print(f"begin at {self.steps} with {self.sum}", flush=True)

    def snapshot(self):
        return self.sum, self.steps

    def apply(self, snapshot):
        self.sum, self.steps = snapshot


def train_step(state):
    if state.steps == STEPS:
        raise StopIteration
    time.sleep(PAUSE)
    state.steps += 1
    share = torch.tensor([state.steps], dtype=torch.float64)
    dist.all_reduce(share)
    state.sum += int(share.item() / dist.get_world_size())


checkpoint.set_checkpoint_manager(checkpoint.FileSystemCheckpointManager(DIRECTORY, keep_last=3))
state = torchelastic.train(CoordinatorP2P(), train_step, Counted(), checkpoint_every=EVERY or None)
print(f"end at {state.steps} with {state.sum}", flush=True)
