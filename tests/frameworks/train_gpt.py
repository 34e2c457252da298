"""A small GPT on generated text, in the manner of nanoGPT: one file, DDP, checkpoint, resume.

python train_gpt.py
torchrun --nproc-per-node 2 train_gpt.py
"""

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BLOCK, BATCH, WIDTH, HEADS, LAYERS = 32, 8, 32, 2, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, time_, _ = x.shape
        qkv = self.qkv(x).view(batch, time_, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time_, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(lines=2000):
    """Sums to be learned by heart."""
    rng = random.Random(1337)
    pairs = [(rng.randrange(50), rng.randrange(50)) for _ in range(lines)]
    return "".join(f"{a}+{b}={a + b};" for a, b in pairs)


def get_batch(data, step, rank):
    """Depends on the step and the rank only, so a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,), generator=generator).tolist()
    x = torch.stack([data[i : i + BLOCK] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


def save(path, model, optimizer, step):
    """Whole or not at all: a run killed here must find the checkpoint before."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend to be larger")
    args = parser.parse_args()

    ddp = "RANK" in os.environ
    if ddp:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ddp else 0
    torch.manual_seed(1337)

    text = make_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[letter] for letter in text])

    raw = GPT(len(letters))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-3)
    step = 0
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "ckpt.pt")
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu")
        raw.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        print(f"[rank {rank}] resumed at step {step}")
    model = DistributedDataParallel(raw) if ddp else raw

    while step < args.steps:
        loss = model(*get_batch(data, step, rank))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        time.sleep(args.step_seconds)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")
            if step % args.save_every == 0:
                save(path, raw, optimizer, step)

    if rank == 0:
        print(f"finished at step {step}")
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
