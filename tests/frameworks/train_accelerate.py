"""Accelerate: a regression with `save_state` every few steps and `load_state` to resume.

python train_accelerate.py
torchrun --nproc-per-node 2 train_accelerate.py
"""

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """Where the training is; saved and loaded with the rest of the state."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def make_data(size=1600):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def save(accelerator, out, step):
    """`save_state` writes many files: only when all have theirs is the directory a checkpoint."""
    accelerator.save_state(str(out / f"step_{step}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (out / f"step_{step}" / "complete").touch()


def last_checkpoint(out):
    steps = [int(path.parent.name.removeprefix("step_")) for path in out.glob("step_*/complete")]
    return out / f"step_{max(steps)}" if steps else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend to be larger")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if checkpoint := last_checkpoint(args.out):
        accelerator.load_state(str(checkpoint))
        print(f"[rank {accelerator.process_index}] resumed at step {progress.step}")

    while progress.step < args.steps:
        epoch, seen = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, seen):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            time.sleep(args.step_seconds)
            accelerator.print(f"step {progress.step}: loss {loss.item():.6f}")
            if progress.step % args.save_every == 0:
                save(accelerator, args.out, progress.step)
            if progress.step == args.steps:
                break

    accelerator.print(f"finished at step {progress.step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
