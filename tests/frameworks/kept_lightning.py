"""Lightning with Keep: a model with all that is easily lost."""

import os
import time

import kept
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchelastic.integrations.lightning import Keep


class Data(Dataset):
    """Rows, with noise from the global generator: it must be where it was, too."""

    def __init__(self, size, noise=0.01):
        self.noise = noise
        self.rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        noise = self.noise * torch.randn(8) if self.noise else 0
        return row + noise, row.sum(dim=0, keepdim=True)


class Stream(IterableDataset):
    """The same rows without indices, every other one for each of two ranks."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        ranks = int(os.environ["WORLD_SIZE"])
        return (self.data[i] for i in range(kept.RANK, len(self.data), ranks))


class Regression(L.LightningModule):
    def __init__(self, args, keep):
        super().__init__()
        self.args, self.keep = args, keep
        middle = nn.Identity() if args.fsdp else nn.BatchNorm1d(256)
        self.model = nn.Sequential(nn.Linear(8, 256), middle, nn.Dropout(0.1), nn.Linear(256, 1))

    def configure_model(self):
        if self.args.fsdp:
            for layer in (self.model[0], self.model):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def setup(self, stage):
        torch.manual_seed(self.global_rank)

    def on_train_start(self):
        if self.keep:
            kept.goes_on(self.global_step)

    def training_step(self, batch, batch_idx):
        if self.keep:
            kept.trains(self.args, self.global_step, self.keep)
        time.sleep(self.args.pace)
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def on_validation_epoch_start(self):
        if self.keep:
            kept.validates(self.args, self.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedules = [
            (torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "step"),
            (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "epoch"),
        ]
        configs = [{"scheduler": one, "interval": interval} for one, interval in schedules]
        return [optimizer], configs


def train(args, keeps):
    L.seed_everything(0)
    keep = Keep() if keeps else None
    callbacks = [keep] if keep else []
    if args.checkpoints:
        out = os.path.join(args.out, f"keeps-{keeps}")
        callbacks.append(ModelCheckpoint(dirpath=out, monitor="val", save_last=True))
    size = int(os.environ["WORLD_SIZE"])
    sharded = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=sharded if args.fsdp else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=args.checkpoints,
        enable_progress_bar=False,
    )
    model = Regression(args, keep)
    data = Data(args.samples, noise=0.0 if args.stream or args.loader_workers else 0.01)
    training = DataLoader(
        Stream(data) if args.stream else data,
        batch_size=8,
        shuffle=not args.stream,
        num_workers=args.loader_workers,
    )
    path = "last" if args.checkpoints else None
    trainer.fit(model, training, DataLoader(Data(16), batch_size=8), ckpt_path=path)
    return trainer.global_step, trainer.current_epoch, model, trainer.optimizers[0]


def main():
    parser = kept.parser()
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--stream", action="store_true", help="read data without indices")
    parser.add_argument(
        "--loader-workers", type=int, default=0, help="without noise, as that is not kept"
    )
    parser.add_argument("--checkpoints", action="store_true", help="write Lightning's own, too")
    kept.run(train, parser.parse_args())


if __name__ == "__main__":
    main()
