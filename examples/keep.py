"""A script for torchrun with three more lines: after a kill, it continues from memory.

    torchelastic run --nproc-per-node 2 examples/keep.py

Kill any of its processes while it runs: all start again and continue from the last committed step.
`--ledger DIR` records which samples each step used; `python -m torchelastic.data.checker DIR`
proves that each was used once per epoch.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import torchelastic
from torchelastic import checkpoint
from torchelastic.data import DataLoader, ElasticSampler, Ledger


def make_dataset(samples):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :8].sum(1, keepdim=True).sin())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--ledger", help="a directory: write down which samples were used")
    parser.add_argument("--checkpoints", help="a directory, for when no memory is left")
    args = parser.parse_args()
    if args.checkpoints:
        store = checkpoint.CheckpointStore(args.checkpoints, keep_last=2, every=100)
        checkpoint.set_checkpoint_manager(store)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = make_dataset(args.samples)
    sampler = ElasticSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    ledger = Ledger(args.ledger) if args.ledger else None
    kept = torchelastic.TorchState(  # one
        model=model, optimizer=optimizer, sampler=sampler, ledger=ledger
    )
    start = kept.restore()  # two
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} workers go on from step {start}", flush=True)

    while sampler.epoch < args.epochs:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets) * loader.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.commit()  # three

    if dist.get_rank() == 0:
        print(f"done after {kept.step} steps, loss {loss.item():.4f}", flush=True)
    checkpoint.finish()
    if ledger is not None:
        ledger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
