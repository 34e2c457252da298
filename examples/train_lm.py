"""A small character-level transformer that learns to write tales, and survives kills.

    torchelastic run --nproc-per-node 4 --max-restarts 1000 examples/train_lm.py
    torchelastic run --nproc-per-node 4 --max-restarts 1000 examples/train_lm.py --kill-every 5
    torchelastic run --nproc-per-node 3 examples/train_lm.py --inject-nan 20:1

Or kill workers yourself while it runs: `pkill -9 -n -f train_lm.py` kills one. The loss continues
where it was: the survivors keep their model, and the step in flight is redone. The batch of a step
is the same at any world size, and so is the curve. A step with bad numbers is skipped.
"""

import argparse
import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import torchelastic
from torchelastic import checkpoint
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

TEXT = Path(__file__).parent / "data" / "tales.txt"
CONTEXT = 64
BATCH = 32  # sequences a step, over all workers
WIDTH, HEADS, LAYERS = 64, 4, 4


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        queries, keys, values = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attend(self.before_attention(x)).chunk(3, dim=-1)
        )
        heads = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.merge(heads.transpose(1, 2).flatten(-2))
        return x + self.think(x)


class Transformer(nn.Module):
    """Predicts the next character from at most CONTEXT characters. About 200,000 parameters."""

    def __init__(self, characters):
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.predict = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, x):
        return self.predict(self.blocks(self.embed(x) + self.position[: x.shape[1]]))


class Text:
    """The tales as numbers, one for each character."""

    def __init__(self, path):
        text = path.read_text()
        self.alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self.numbers = torch.tensor([number[character] for character in text])

    def write(self, model, length):
        """Let the model continue from a line's beginning."""
        written = torch.zeros(1, 1, dtype=torch.long)
        chance = torch.Generator().manual_seed(0)
        for _ in range(length):
            with torch.no_grad():
                likely = model(written[:, -CONTEXT:])[0, -1].div(0.5).softmax(dim=-1)
            following = torch.multinomial(likely, 1, generator=chance)
            written = torch.cat([written, following[None]], dim=1)
        return "".join(self.alphabet[number] for number in written[0].tolist()).strip()


class Windows(torch.utils.data.Dataset):
    """Pieces of the tales, one behind the other."""

    def __init__(self, numbers):
        self._numbers = numbers

    def __len__(self):
        return (len(self._numbers) - 1) // CONTEXT

    def __getitem__(self, index):
        return self._numbers[index * CONTEXT : (index + 1) * CONTEXT + 1]


def train_step_for(loader, guard, args):
    batches = iter(loader)

    def train_step(state):
        nonlocal batches
        if state.step >= args.steps:
            raise StopIteration
        windows = next(batches, None)
        if windows is None:  # another epoch
            batches = iter(loader)
            windows = next(batches)
        rank, size = dist.get_rank(), dist.get_world_size()
        predicted, wanted = state.model(windows[:, :-1]), windows[:, 1:]
        # DDP takes the mean over the ranks; the weight makes it the mean over the whole batch.
        loss = functional.cross_entropy(predicted.flatten(0, 1), wanted.flatten()) * loader.weight
        if args.inject_nan == (state.step + 1, rank):
            loss = loss * math.nan
        guard.loss(loss)
        state.optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / size
        if state.step % args.tell_every == 0:
            dist.all_reduce(mean)  # before optimizer.step: then undoing a step needs no copies
        state.optimizer.step()
        state.scheduler.step()
        if rank == 0 and state.step % args.tell_every == 0:
            print(
                f"{time.strftime('%H:%M:%S')}  step {state.step:5}  loss {mean.item():.4f}  "
                f"workers {size}  generation {session.current().generation}",
                flush=True,
            )

    return train_step


def kill_now_and_then(seconds, done):
    """Wherever this worker is just then: in a collective, in the optimizer, between two steps."""
    while not done.wait(seconds):
        if random.SystemRandom().random() < 0.25:  # of four workers about one
            os.kill(os.getpid(), signal.SIGKILL)


def warmed_up(steps):
    """A factor for the learning rate: up for 50 steps, then down along a cosine."""
    return lambda step: min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * min(1, step / steps)))


def step_and_rank(text):
    step, rank = text.split(":")
    return int(step), int(rank)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tell-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--kill-every",
        type=float,
        metavar="SECONDS",
        help="about so often one of four workers kills itself (SIGKILL)",
    )
    parser.add_argument(
        "--inject-nan",
        type=step_and_rank,
        metavar="STEP:RANK",
        help="make the loss of this rank NaN in this step, the first one is 1",
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIRECTORY", help="keep some in here")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(0)
    text = Text(TEXT)
    model = Transformer(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_up(args.steps))
    dataset, guard = Windows(text.numbers), torchelastic.Guard()
    sampler = ElasticSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, policy=BatchPolicy.constant_global(BATCH))
    state = torchelastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, guard=guard
    )

    if args.checkpoints:
        manager = checkpoint.FileSystemCheckpointManager(args.checkpoints, keep_last=3)
        checkpoint.set_checkpoint_manager(manager)
    done = threading.Event()
    if args.kill_every:
        threading.Thread(target=kill_now_and_then, args=(args.kill_every, done)).start()
    try:
        torchelastic.train(
            CoordinatorP2P(), train_step_for(loader, guard, args), state, checkpoint_every=100
        )
    finally:
        done.set()

    if os.environ["RANK"] == "0":
        print(f"after {state.step} steps it writes:\n\n{text.write(model, 300)}", flush=True)


if __name__ == "__main__":
    main()
