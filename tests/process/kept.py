"""A plain script that keeps its state: a model with all that is easily lost, and a line per step.

    kept.py LINES ORDERS [key=value ...]

Keys: steps; pause, seconds in each step; hold, steps before which it waits for the order `go`, or
for one with the step's number, `go-4`, and with replicas=1 for its copy on another node;
checkpoints, a directory for one after every third step; took, the seconds that the last one is said
to have taken; expected=1: before generation 0 trains, it writes down the fingerprints of a training
that keeps nothing and that nobody interrupts.
"""

from __future__ import annotations

import hashlib
import random
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_side import GENERATION, HERE, KEYS, RANK, SIZE, is_ordered, write

import torchelastic
from torchelastic import checkpoint, faults

STEPS, PAUSE = int(KEYS.get("steps", "12")), float(KEYS.get("pause", "0"))
tell = partial(write, **HERE)


class Data:
    """A position in a stream of random batches, another one for each rank."""

    def __init__(self) -> None:
        self.position = self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += 1
        seed = (self.position + self.taken) * SIZE + RANK
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))

    def committed(self) -> None:
        self.position, self.taken = self.position + self.taken, 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.taken = state["position"], 0


class Training:
    """The same at each start, but for the random numbers, which a restart must bring back."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 256)
        )
        # Without broadcasts every rank has buffers of its own.
        self.wrapped = DistributedDataParallel(self.model, broadcast_buffers=False)
        self.optimizer = torch.optim.Adam(self.wrapped.parameters(), lr=0.01)
        self.data = Data()
        torch.manual_seed(5 + RANK + 100 * GENERATION)
        random.seed(5 + RANK + 100 * GENERATION)

    def step(self) -> None:
        loss = self.wrapped(self.data.next()).square().mean() * (1 + random.random())
        self.optimizer.zero_grad()
        loss.backward()
        if faults.planned:
            faults.at("step.begin")
        self.optimizer.step()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        entries = [tensor for of in self.optimizer.state.values() for tensor in of.values()]
        for tensor in (*self.model.state_dict().values(), torch.get_rng_state(), *entries):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


def write_expected() -> None:
    undisturbed = Training()
    for step in range(1, 1 + STEPS):
        undisturbed.step()
        undisturbed.data.committed()
        tell("expected", step=step, fingerprint=undisturbed.fingerprint())


def wait_for_go() -> None:
    """Not before the last commit is where it is to be: sealed, and copied to another node."""
    writer = kept._keeper._writer
    writer.finish()
    while kept.step > start and "replicas" in KEYS:
        if writer._own._memory.replicated() == (GENERATION, kept.step):
            break
        time.sleep(0.005)
    if "took" in KEYS:
        checkpoint.wait()
        checkpoint.get_checkpoint_manager().seconds = float(KEYS["took"])
    tell("holding", step=kept.step)
    while not is_ordered("go") and not is_ordered(f"go-{kept.step}"):
        time.sleep(0.005)


torch.set_num_threads(1)
warnings.simplefilter("ignore", FutureWarning)  # torch's, of the name broadcast_buffers
dist.init_process_group("gloo")
if "expected" in KEYS and GENERATION == 0:
    write_expected()
it = Training()
if "checkpoints" in KEYS:
    checkpoint.set_checkpoint_manager(checkpoint.FileSystemCheckpointManager(KEYS["checkpoints"]))
kept = torchelastic.TorchState(model=it.wrapped, optimizer=it.optimizer, sampler=it.data)
start = kept.restore()
tell("start", step=start, position=it.data.position)
for step in range(start, STEPS):
    if str(step) in KEYS.get("hold", "").split(","):
        wait_for_go()
    it.step()
    time.sleep(PAUSE)
    kept.commit()
    tell("step", step=kept.step, fingerprint=it.fingerprint())
    if kept.step % 3 == 0 and RANK == 0:
        checkpoint.save(kept, kept.step)
checkpoint.finish()
tell("end", step=kept.step, position=it.data.position)
dist.barrier()
dist.destroy_process_group()
