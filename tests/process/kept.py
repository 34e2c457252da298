"""A plain script that keeps its state: a model with all that is easily lost, and a line per step.

    kept.py LINES ORDERS [key=value ...]

Keys: steps; pause, seconds in each step; hold, steps before which it waits for the order `go`, or
for one with the step's number, `go-4`, and with replicas=1 for its copy on another node;
checkpoints, a directory for one after every third step; took, the seconds that the last one is said
to have taken; bare=1, no DDP around the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchelastic
from torchelastic import checkpoint, faults

LINES, ORDERS = Path(sys.argv[1]), Path(sys.argv[2])
KEYS = dict(text.split("=", 1) for text in sys.argv[3:])
STEPS, PAUSE = int(KEYS.get("steps", "12")), float(KEYS.get("pause", "0"))
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


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


def write(event: str, **more: object) -> None:
    said = {"event": event, "generation": GENERATION, "rank": RANK, "world_size": SIZE, **more}
    lines.write(json.dumps(said) + "\n")


def fingerprint() -> str:
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), torch.get_rng_state()):
        digest.update(tensor.numpy().tobytes())
    for entries in optimizer.state.values():
        for tensor in entries.values():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


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
    write("holding", step=kept.step)
    while not (ORDERS / "go").exists() and not (ORDERS / f"go-{kept.step}").exists():
        time.sleep(0.005)


torch.set_num_threads(1)
warnings.simplefilter("ignore", FutureWarning)  # torch's, of the name broadcast_buffers
torch.manual_seed(5 + RANK + 100 * GENERATION)
random.seed(5 + RANK + 100 * GENERATION)
lines = open(LINES / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
dist.init_process_group("gloo")
with torch.random.fork_rng():
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 256)
    )
# Without broadcasts every rank has buffers of its own.
wrapped = model if KEYS.get("bare") else DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
data = Data()
if "checkpoints" in KEYS:
    checkpoint.set_checkpoint_manager(checkpoint.FileSystemCheckpointManager(KEYS["checkpoints"]))

if GENERATION == 0:
    torch.manual_seed(5 + RANK)
    random.seed(5 + RANK)
kept = torchelastic.TorchState(model=wrapped, optimizer=optimizer, sampler=data)
start = kept.restore()
write("start", step=start, pid=os.getpid())
for step in range(start, STEPS):
    if str(step) in KEYS.get("hold", "").split(","):
        wait_for_go()
    loss = wrapped(data.next()).square().mean() * (1 + random.random())
    optimizer.zero_grad()
    loss.backward()
    if faults.planned:
        faults.at("step.begin")
    optimizer.step()
    time.sleep(PAUSE)
    kept.commit()
    write("step", step=kept.step)
    if kept.step % 3 == 0 and RANK == 0:
        checkpoint.save(kept, kept.step)
checkpoint.finish()
write("end", step=kept.step, position=data.position, fingerprint=fingerprint())
dist.barrier()
dist.destroy_process_group()
