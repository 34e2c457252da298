"""A training as people write it: torch alone. Arguments: where its checkpoint is.

Two ranks, Adam, a checkpoint of model and optimizer every ten steps. It ends when somebody has made
a file `finish` beside the checkpoint.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CHECKPOINT = Path(sys.argv[1])

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
done = False
while not done:
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(0.05)
    flag = torch.tensor(float((CHECKPOINT.parent / "finish").exists()))
    dist.all_reduce(flag)
    done = bool(flag)
    if dist.get_rank() == 0:
        part = CHECKPOINT.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        os.replace(part, CHECKPOINT)
dist.destroy_process_group()
