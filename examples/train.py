"""An ordinary training script for torchrun: DDP and a checkpoint, without torchelastic.

    torchelastic run --nproc-per-node 2 examples/train.py

Kill any of its processes while it runs: it continues from its checkpoint.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save_checkpoint(path, model, optimizer, step):
    """A kill at any moment leaves the old checkpoint or the new one, never half of one."""
    part = path.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part
    )
    part.replace(path)


def load_checkpoint(path, model, optimizer):
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def note(directory, **facts):
    with open(directory / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--record", type=Path, help="append a line per step to a file in here")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load_checkpoint(args.checkpoint, model, optimizer)
    ddp = DistributedDataParallel(model)
    if rank == 0:
        print(f"training on {world_size} workers from step {step}", flush=True)

    while step < args.steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
        loss = nn.functional.mse_loss(ddp(x), x.sum(dim=1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)  # an accelerator would be busy now
        step += 1
        if args.record:
            note(args.record, t=time.monotonic(), step=step, size=world_size, rank=rank)
        if rank == 0 and step % 10 == 0:
            save_checkpoint(args.checkpoint, model, optimizer, step)
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
