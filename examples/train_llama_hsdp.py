"""A small Llama-like model from scratch, with FSDP2 and tensor parallelism, that survives kills.

    torchelastic run --nproc-per-node 4 examples/train_llama_hsdp.py
    torchelastic run --nproc-per-node 8 examples/train_llama_hsdp.py --shard 2 --tensor 2

The first trains 2 replicas of 2 workers, the second 2 replicas of 4 (2 shards x 2 tensor parallel).
Kill a worker while it trains: `kill -9` with one of the process ids that it prints. The other
replica goes on at once; the lost one comes back with a new worker.
"""

import argparse
import os
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

TEXT = Path(__file__).parent / "data" / "tales.txt"
CONTEXT = 64
BATCH = 32  # sequences a step, over all replicas
WIDTH, HIDDEN, HEADS, LAYERS = 64, 160, 4, 4


def rotate(x):
    """Rotary position embedding of (batch, heads, positions, channels)."""
    half = x.shape[-1] // 2
    speed = 10000 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * speed
    left, right = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention. Tensor parallelism gives each worker some of the heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        queries, keys, values = (
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        heads = functional.scaled_dot_product_attention(
            rotate(queries), rotate(keys), values, is_causal=True
        )
        return self.out(heads.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_feed = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), SwiGLU()

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.feed(self.before_feed(x))


class Llama(nn.Module):
    """Predicts the next character. About 200,000 parameters."""

    def __init__(self, characters):
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.predict = nn.Linear(WIDTH, characters, bias=False)

    def forward(self, x):
        return self.predict(self.norm(self.blocks(self.embed(x))))


class Windows(torch.utils.data.Dataset):
    """The tales as sequences of CONTEXT characters and those that follow them."""

    def __init__(self, path):
        text = path.read_text()
        self.alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self.numbers = torch.tensor([number[character] for character in text])

    def __len__(self):
        return (len(self.numbers) - 1) // CONTEXT

    def __getitem__(self, index):
        window = self.numbers[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def shard(model, mesh):
    """Split each layer over "tensor", then shard all parameters over "shard". Sends nothing."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {"feed.gate": columns, "feed.up": columns, "attention.out": rows, "feed.down": rows}
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            # No broadcast of the weights: all workers have made the same, from the same seed.
            parallelize_module(block, mesh["tensor"], plan, src_data_rank=None)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def train_step_for(loader, steps, mesh):
    batches, introduced = iter(loader), False

    def next_batch():
        nonlocal batches
        try:
            return next(batches)
        except StopIteration:  # the end of an epoch
            batches = iter(loader)
            return next(batches)

    def train_step(state):
        nonlocal introduced
        if state.step >= steps:
            raise StopIteration
        world = session.current()  # of all replicas; dist.get_rank() is the rank in this one
        replica, replicas = world.rank // mesh.size(), world.size // mesh.size()
        if not introduced:
            place = f"replica {replica}, coordinate {dist.get_rank()}"
            print(f"process {os.getpid()}: rank {world.rank}, {place}", flush=True)
            introduced = True
        inputs, targets = next_batch()
        predicted = state.model(inputs).flatten(0, 1)
        loss = functional.cross_entropy(predicted, targets.flatten()) * loader.weight
        state.optimizer.zero_grad()
        loss.backward()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)  # over this replica, before optimizer.step
        state.optimizer.step()
        if dist.get_rank() == 0:
            clock = datetime.now().time().isoformat("milliseconds")
            counts = f"replica {replica} of {replicas}  generation {world.generation}"
            line = f"{clock}  step {state.step:4}  loss {mean.item():.4f}  {counts}\n"
            print(line, end="", flush=True)  # in one write: workers share the terminal

    return train_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=int, default=2, help="workers that FSDP2 shards over")
    parser.add_argument("--tensor", type=int, default=1, help="workers that split each layer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ledger", type=Path, help="record the samples of each step in here")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = torchelastic.mesh({"shard": args.shard, "tensor": args.tensor})
    windows = Windows(TEXT)
    model = Llama(len(windows.alphabet))
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = ElasticSampler(windows, shuffle=True, seed=0)
    loader = DataLoader(windows, sampler=sampler, policy=BatchPolicy.constant_global(BATCH))
    state = torchelastic.TorchState(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        ledger=Ledger(args.ledger) if args.ledger else None,
    )
    torchelastic.train(CoordinatorP2P(), train_step_for(loader, args.steps, mesh), state)


if __name__ == "__main__":
    main()
