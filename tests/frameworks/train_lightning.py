"""Lightning: a regression, a checkpoint every epoch, `ckpt_path="last"` to resume.

python train_lightning.py
torchrun --nproc-per-node 2 train_lightning.py
"""

import argparse
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self, step_seconds=0.0):
        super().__init__()
        self.step_seconds = step_seconds
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def on_train_start(self):
        if self.global_step:
            print(f"[rank {self.global_rank}] resumed at step {self.global_step}")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(self.step_seconds)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}: loss {outputs['loss'].item():.6f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_data(size=320):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend to be larger")
    args = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        default_root_dir=args.out,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(dirpath=args.out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    model = Regression(args.step_seconds)
    trainer.fit(model, DataLoader(make_data(), batch_size=8, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"finished at step {trainer.global_step}")


if __name__ == "__main__":
    main()
