"""A worker that trains with a fixed batch, and writes the hash of its weights in the end.

fixed_batches.py LINES ORDERS ledger=DIRECTORY [key=value ...]

Keys: model (transformer, conv, lstm, gan), mode (train, keep), steps, count, dtype (fp32, bf16),
bucket (bytes of a bucket), wait (seconds that a micro-batch takes at least), slow (ranks that take
twice as long), shares (speed, equal), samples, loaders (loading processes),
measure (steps between two comparisons of speeds), differs=1 (each rank has another count),
shard, tensor (the mesh of a replica over which the model is sharded; 0: it is not),
check (steps between two comparisons of states), flip (RANK:STEP:KIND:TENSOR:BIT:ELEMENT..., with
spaces between several: after that step, a bit of a `parameter`, or of its optimizer's `state`),
audit (rate), bits (refuse, warn), wrong (RANK:STEP:HOW: gradients are 1 + 2**-12 times as large,
`once`, or of one process from that step `on`; `raise`: an error in its last micro-batch).

The order `last` has another number of steps.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import worker_side
from sharded_model import by_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worker_side import write

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import fixed_steps as steps
from torchelastic.training import fixed_sums as sums
from torchelastic.training import session

KEYS = {"model": "transformer", "mode": "train", "steps": 12, "count": 8, "dtype": "fp32"}
KEYS |= {"bucket": sums.BUCKET_BYTES, "wait": 0.0, "samples": 150, "loaders": 0, "shares": ""}
KEYS |= {"slow": "", "measure": steps.MEASURE_EVERY, "differs": 0}
KEYS |= {
    "shard": 0,
    "tensor": 0,
    "check": 0,
    "flip": "",
    "audit": 0.0,
    "bits": "refuse",
    "wrong": "",
}
KEYS["ledger"] = ""
KEYS |= {name: type(KEYS[name])(value) for name, value in worker_side.KEYS.items()}
sums.BUCKET_BYTES, steps.MEASURE_EVERY = KEYS["bucket"], KEYS["measure"]
torch.set_num_threads(1)
torch.manual_seed(os.getpid())  # only the first rank's parameters count: the same by the seed
if os.environ["RANK"] == "0" or KEYS["mode"] == "train":
    torch.manual_seed(0)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head, self.unused = nn.Linear(16, 50), nn.Linear(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Conv(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(144, 50),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.float() / 50)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 12), nn.Linear(12, 50)
        self.lstm = nn.LSTM(12, 12, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def sharded(model: Transformer) -> Transformer:
    sizes = {name: KEYS[name] for name in ("shard", "tensor") if KEYS[name]}
    mesh = torchelastic.mesh(sizes)
    layer = model.body.layers[0]
    if "tensor" in sizes:
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], plan, src_data_rank=None)
    if "shard" in sizes:
        for part in (layer, model):
            fully_shard(part, mesh=mesh["shard"])
    return model


def noise(size: int) -> torch.Tensor:
    return torch.randn(size, 6)


MODELS = {"transformer": Transformer, "conv": Conv, "lstm": Lstm}
if KEYS["model"] == "gan":
    models = [
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 64)),
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)),
    ]
else:
    models = [MODELS[KEYS["model"]]()]
if KEYS["shard"] or KEYS["tensor"]:
    models = [sharded(models[0])]
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
data = torch.randint(50, (KEYS["samples"], 64), generator=torch.Generator().manual_seed(1))
sampler = ElasticSampler(len(data), seed=3)
count = KEYS["count"] + KEYS["differs"] * int(os.environ["RANK"])
policy = BatchPolicy.fixed(
    micro=4, count=count, shares=KEYS["shares"] or "speed", other_bits=KEYS["bits"]
)
loader = DataLoader(data, sampler=sampler, policy=policy, num_workers=KEYS["loaders"])
state = torchelastic.TorchState(
    model=models,
    optimizer=optimizers,
    sampler=sampler,
    policy=policy,
    ledger=Ledger(KEYS["ledger"]),
    guard=torchelastic.Guard(check_every=KEYS["check"] or None, audit=KEYS["audit"] or None),
)
batches = iter(loader)


#: Whether this worker runs the last micro-batch of its share.
is_last = False


def is_wrong() -> bool:
    """Whether the gradient that is computed now is wrong."""
    rank, step, how = KEYS["wrong"].split(":")
    if os.environ["RANK"] != rank or state.step < int(step):
        return False
    if how == "raise" and not is_last:
        return False
    try:
        (worker_side.ORDERS / "wrong").open("x").write(str(os.getpid()))
    except FileExistsError:
        return how == "on" and (worker_side.ORDERS / "wrong").read_text() == str(os.getpid())
    write("wrong", step=state.step, rank=int(rank))
    if how == "raise":
        raise ValueError("in a backward")
    return True


if KEYS["wrong"]:
    next(models[0].parameters()).register_hook(
        lambda gradient: gradient * (1 + 2**-12) if is_wrong() else gradient
    )


def next_batch() -> torch.Tensor:
    global batches
    while True:
        try:
            return next(batches)
        except StopIteration:
            batches = iter(loader)


def micro_batches(batch: torch.Tensor, model: nn.Module, step: int):
    global is_last
    for micro in policy.accumulate(batch, model, total=loader.total):
        slow = 2 if os.environ["RANK"] in KEYS["slow"].split() else 1
        time.sleep(KEYS["wait"] * slow)
        is_last = micro.last
        yield micro
        write("ran", step=step)


def one_step(step: int) -> None:
    batch = next_batch()
    for optimizer in optimizers:
        optimizer.zero_grad()
    if KEYS["model"] == "gan":
        play(batch, step)
        return
    for micro in micro_batches(batch, models[0], step):
        with torch.autocast("cpu", torch.bfloat16, enabled=KEYS["dtype"] == "bf16"):
            found = models[0](micro.data)
        targets = micro.data.roll(1, 1) if found.dim() == 3 else micro.data[:, 0]
        found, targets = found.float().flatten(0, -2), targets.flatten()
        micro.backward(nn.functional.cross_entropy(found, targets))
    for some in by_mesh(list(models[0].parameters())):
        nn.utils.clip_grad_norm_(some, 0.5)
    optimizers[0].step()


def play(batch: torch.Tensor, step: int) -> None:
    """The critic's loop, and then the generator's."""
    generator, critic = models
    critic.requires_grad_(True)  # an interrupted step may have left it off
    for micro in micro_batches(batch, critic, step):
        real, made = micro.data.float() / 50, generator(noise(micro.samples)).detach()
        micro.backward(critic(made).mean() - critic(real).mean() + critic(real).pow(2).mean())
    optimizers[1].step()
    critic.requires_grad_(False)
    for micro in micro_batches(batch, generator, step):
        micro.backward(-critic(generator(noise(micro.samples))).mean())
    optimizers[0].step()


def flip_bits(step: int) -> None:
    """Flip the same bit in some elements, as broken memory does; each time once."""
    for flip in KEYS["flip"].split():
        rank, at, kind, number, bit, *elements = flip.split(":")
        if (rank, int(at)) != (os.environ["RANK"], step) or worker_side.is_ordered(flip):
            continue
        (worker_side.ORDERS / flip).touch()
        tensor = list(models[0].parameters())[int(number)]
        if kind == "state":
            tensor = optimizers[0].state[tensor]["exp_avg"]
        bits = tensor.detach().view(-1).view(torch.int32)
        for element in elements:
            bits[int(element) % len(bits)] ^= 1 << int(bit)
        write("flipped", step=step, rank=int(rank), size=int(os.environ["WORLD_SIZE"]))


if KEYS["mode"] == "train":

    def train_step(state: torchelastic.TorchState) -> None:
        last = worker_side.ORDERS / "last"
        if state.step == (int(last.read_text()) if last.exists() else KEYS["steps"]):
            write("done", digest=state.digest(), loss=policy.loss)
            session.current().group.tell_all([0])  # the first that ends would end all
            raise StopIteration
        one_step(state.step)
        flip_bits(state.step)

    torchelastic.train(CoordinatorP2P(), train_step, state)
else:
    dist.init_process_group("gloo")
    for step in range(state.restore(), KEYS["steps"]):
        one_step(step)
        flip_bits(step)
        state.commit()
    write("done", digest=state.digest(), loss=policy.loss)
