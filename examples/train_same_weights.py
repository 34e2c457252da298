"""A transformer with dropout whose weights are the same, to the bit, on any number of workers.

    torchelastic run --nproc-per-node 4 examples/train_same_weights.py
    torchelastic run --nproc-per-node 1 examples/train_same_weights.py

Kill any of its workers while it runs, or add some: the SHA-256 of every step stays the same.
`./scripts/demo --bits` does that.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train_lm import TEXT, Text, Windows

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler
from torchelastic.p2p import CoordinatorP2P

WIDTH = 32


class Transformer(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.predict = nn.Linear(WIDTH, characters)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.predict(self.layers(self.embed(x), mask=mask, is_causal=True))


def note(directory, **facts):
    with open(directory / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step at least")
    parser.add_argument("--record", type=Path, help="append a line per step to a file in here")
    args = parser.parse_args()

    torch.set_num_threads(1)  # another number gives other bits
    torch.manual_seed(0)
    text = Text(TEXT)
    model = Transformer(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = Windows(text.numbers)
    sampler = ElasticSampler(dataset)
    policy = BatchPolicy.fixed(micro=2, count=8)  # 16 windows a step, on any number of workers
    loader = DataLoader(dataset, sampler=sampler, policy=policy)
    state = torchelastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, policy=policy
    )
    batches = iter(loader)

    def train_step(state):
        nonlocal batches
        if args.record:
            rank, size = dist.get_rank(), dist.get_world_size()
            facts = {"step": state.step, "size": size, "rank": rank, "digest": state.digest()}
            note(args.record, t=time.monotonic(), **facts)
        if state.step >= args.steps:
            raise StopIteration
        due = time.monotonic() + args.pace
        batch = next(batches, None)
        if batch is None:  # another epoch
            batches = iter(loader)
            batch = next(batches)
        state.optimizer.zero_grad()
        for micro in policy.accumulate(batch, model, total=loader.total):
            predicted, wanted = model(micro.data[:, :-1]), micro.data[:, 1:]
            loss = nn.functional.cross_entropy(predicted.flatten(0, 1), wanted.flatten())
            micro.backward(loss)
        state.optimizer.step()
        time.sleep(max(0.0, due - time.monotonic()))

    torchelastic.train(CoordinatorP2P(), train_step, state)
    if os.environ["RANK"] == "0":
        print(f"after {state.step} steps: loss {policy.loss:.4f}, SHA-256 {state.digest()}")


if __name__ == "__main__":
    main()
