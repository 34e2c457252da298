"""Accelerate with Keep: a loop with all that is easily lost, and a line per rank at its end.

The tests start it with `--die rank:step`: that rank is killed in its first life when so many steps
are done, in the batch after them (or, with `--die-in validation`, at the end of the epoch).
"""

import argparse
import hashlib
import os
import signal
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.integrations.accelerate import Keep

RANK = int(os.environ["RANK"])
FIRST_LIFE = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def make_data(size):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def fingerprint(model, optimizer):
    digest = hashlib.sha256()
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for entries in optimizer.state.values():
        tensors.extend(entries.values())
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds in a batch")
    parser.add_argument("--die", default="")
    parser.add_argument("--die-in", default="training")
    args = parser.parse_args()

    def die(where):
        if FIRST_LIFE and args.die == f"{RANK}:{keep.step}" and where == args.die_in:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = DataLoader(make_data(args.samples), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(RANK)
    keep = Keep(accelerator)
    print(f"[rank {RANK}] goes on from step {keep.step}")
    for epoch in keep.epochs(args.epochs):
        for x, y in keep.batches(loader):
            die("training")
            time.sleep(args.pace)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            keep.commit()
        die("validation")
        print(f"[rank {RANK}] validates after step {keep.step}")
        epochs = epoch + 1
    print(
        f"[rank {RANK}] ends at step {keep.step} epoch {epochs} "
        f"with {fingerprint(accelerator.unwrap_model(model), optimizer)}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
