"""A small training for pictures of the page."""

from __future__ import annotations

import time

import torch
from torch import nn

import torchelastic
from torchelastic.metrics import put_metric
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

torch.manual_seed(5)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)


def train_step(state: torchelastic.TorchState) -> None:
    seed = state.step * 1000 + session.current().rank
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.mse_loss(state.model(inputs), inputs[:, :8].sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    put_metric("loss", loss.item())
    time.sleep(0.05)  # an accelerator would be busy now


torchelastic.train(
    CoordinatorP2P(), train_step, torchelastic.TorchState(model=model, optimizer=optimizer)
)
