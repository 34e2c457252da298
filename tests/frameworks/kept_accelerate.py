"""Accelerate with Keep: a loop with all that is easily lost."""

import time

import kept
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.integrations.accelerate import Keep


class NoKeep:
    """In place of Keep, for the same loop without us."""

    def __init__(self, accelerator):
        self.accelerator, self.step = accelerator, 0

    def epochs(self, count):
        return range(count)

    def batches(self, loader):
        return loader

    def commit(self):
        self.step += self.accelerator.sync_gradients


def make_data(size):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def train(args, keeps):
    more = {"fsdp_plugin": kept.fsdp_plugin(args.fsdp)} if args.fsdp else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate, **more)
    set_seed(0)
    middle = nn.Identity() if args.fsdp else nn.BatchNorm1d(256)
    model = nn.Sequential(nn.Linear(8, 256), middle, nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = DataLoader(make_data(args.samples), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(kept.RANK)
    keep = Keep(accelerator) if keeps else NoKeep(accelerator)
    if keeps:
        kept.goes_on(keep.step)
    epochs = 0
    for epoch in keep.epochs(args.epochs):
        epochs = epoch + 1
        for x, y in keep.batches(loader):
            if keeps:
                kept.trains(args, keep.step, keep)
            time.sleep(args.pace)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            keep.commit()
        if keeps:
            kept.validates(args, keep.step)
    return keep.step, epochs, accelerator.unwrap_model(model), optimizer


if __name__ == "__main__":
    kept.run(train, kept.parser().parse_args())
    Accelerator().end_training()
