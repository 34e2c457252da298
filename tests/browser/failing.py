"""A training that finds bad data, for pictures of the page."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

import torchelastic
from torchelastic.metrics import put_metric

#: The step at which rank 1 does.
BAD = 150

dist.init_process_group("gloo")
torch.manual_seed(5)
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
kept = torchelastic.TorchState(model=model, optimizer=optimizer)


def load(step: int, rank: int) -> torch.Tensor:
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    if (step, rank) == (BAD, 1):
        raise ValueError(f"shard 17 has {len(batch) - 15} samples, {len(batch)} are needed")
    return batch


def main() -> None:
    for step in range(kept.restore(), 1_000_000):
        if step % 50 == 0:
            print(f"step {step}: reading shard {step // 10 + 2}", flush=True)
        inputs = load(step, dist.get_rank())
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        put_metric("loss", loss.item())
        time.sleep(0.05)  # an accelerator would be busy now
        kept.commit()


if __name__ == "__main__":
    main()
