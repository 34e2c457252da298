"""Lightning with Keep: a model with all that is easily lost, and a line per rank at its end.

The tests start it with `--die rank:step`: that rank is killed in its first life when so many steps
are done, in the batch after them (or, with `--die-in validation`, in the validation after them).
"""

import argparse
import hashlib
import os
import signal
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchelastic.integrations.lightning import Keep

FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


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
        return (self.data[i] for i in range(int(os.environ["RANK"]), len(self.data), ranks))


class Regression(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = nn.Sequential(
            nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 1)
        )

    def setup(self, stage):
        torch.manual_seed(self.global_rank)

    def on_train_start(self):
        print(f"[rank {self.global_rank}] goes on from step {self.global_step}")

    def training_step(self, batch, batch_idx):
        self.die("training")
        time.sleep(self.args.pace)
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def on_validation_epoch_start(self):
        self.die("validation")
        print(f"[rank {self.global_rank}] validates after step {self.global_step}")

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def die(self, where):
        here = f"{self.global_rank}:{self.global_step}"
        if FIRST_LIFE and self.args.die == here and self.args.die_in == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedules = [
            (torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "step"),
            (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "epoch"),
        ]
        configs = [{"scheduler": one, "interval": interval} for one, interval in schedules]
        return [optimizer], configs


def fingerprint(trainer, model):
    digest = hashlib.sha256()
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for entries in trainer.optimizers[0].state.values():
        tensors.extend(entries.values())
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stream", action="store_true", help="read data without indices")
    parser.add_argument(
        "--loader-workers", type=int, default=0, help="without noise, as that is not kept"
    )
    parser.add_argument("--checkpoints", action="store_true", help="write Lightning's own, too")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds in a batch")
    parser.add_argument("--die", default="")
    parser.add_argument("--die-in", default="training")
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(0)
    checkpoints = []
    if args.checkpoints:
        checkpoints = [ModelCheckpoint(dirpath=args.out, monitor="val", save_last=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        callbacks=[Keep(), *checkpoints],
        logger=False,
        enable_checkpointing=bool(checkpoints),
        enable_progress_bar=False,
    )
    model = Regression(args)
    data = Data(args.samples, noise=0.0 if args.stream or args.loader_workers else 0.01)
    training = DataLoader(
        Stream(data) if args.stream else data,
        batch_size=8,
        shuffle=not args.stream,
        num_workers=args.loader_workers,
    )
    path = "last" if args.checkpoints else None
    trainer.fit(model, training, DataLoader(Data(16), batch_size=8), ckpt_path=path)
    print(
        f"[rank {trainer.global_rank}] ends at step {trainer.global_step} "
        f"epoch {trainer.current_epoch} with {fingerprint(trainer, model)}"
    )


if __name__ == "__main__":
    main()
