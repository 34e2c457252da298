"""A DDP script with a checkpoint file of its own, to which the three lines of keep were added.

    own_checkpoints.py LINES ORDERS file=PATH steps=N

It saves every fifth step, and each line says how many steps its optimizer has taken.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_side import GENERATION, KEYS, write

import torchelastic

FILE, STEPS = Path(KEYS["file"]), int(KEYS["steps"])


def tell(event: str, step: int) -> None:
    taken = [int(entry["step"]) for entry in optimizer.state.values()]
    write(event, generation=GENERATION, step=step, taken=max(taken, default=0))


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
start = 0
if FILE.exists():
    saved = torch.load(FILE)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
tell("loaded", start)

kept = torchelastic.TorchState(model=model, optimizer=optimizer)
start = kept.restore(start=start)
tell("start", start)
for step in range(start, STEPS):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    kept.commit()
    if (step + 1) % 5 == 0 and dist.get_rank() == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "step": step + 1}, FILE.with_suffix(".new"))
        FILE.with_suffix(".new").replace(FILE)
tell("end", kept.step)
dist.barrier()
dist.destroy_process_group()
