"""Training with a fixed batch whose weights are hashed at the beginning of each step.

    bits_train.py --record=DIRECTORY --checkpoint=DIRECTORY [key=value ...]

A line `hash` has the SHA-256 of all parameters, buffers and optimizer states after as many steps.
The file STOP beside the records ends the training: it has the number of the last step.

Mode `ddp` is the control: the same micro-batches, with gradients that DDP averages.
"""

import argparse
import faulthandler
import os
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed
from workload import StepLog

import torchelastic
from torchelastic.checkpoint import CheckpointStore, finish, set_checkpoint_manager
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.tensors import agreement
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.training import fixed_steps, fixed_sums, session

MICRO, WIDTH, TOKENS = 4, 64, 50
KEYS: dict[str, Any] = {
    "mode": "train",
    "model": "transformer",
    "count": 8,
    "steps": 200,
    "samples": 150,
    "seed": 0,
    # Bytes of a bucket: several of them, so that some are sent during the last backward.
    "bucket": 6000,
    # Seconds that a micro-batch takes at least; the ranks that take longer, and how many times.
    "wait": 0.0,
    "slow": "",
    "slowness": 2.0,
    "shares": "speed",
    # Steps between two comparisons of the speeds, two checkpoints (0: none), two evaluations.
    "measure": fixed_steps.MEASURE_EVERY,
    "every": 0,
    "evaluate": 0,
    "loaders": 0,
    # The part of micro-batches that other workers repeat; and RANK:STEP:HOW: gradients of one
    # process are 1 + 2**-12 times as large, `once` or from that step `on`.
    "audit": 0.0,
    "wrong": "",
}


class Transformer(nn.Module):
    """With dropout, and a layer that is not used in any step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.unused = nn.Linear(32, TOKENS), nn.Linear(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        if self.training and KEYS["model"] == "transformer-bf16":
            return self.head(recomputed(self.body, embedded, use_reentrant=False))
        return self.head(self.body(embedded))


class Convolution(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(128, TOKENS),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.float() / TOKENS)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 24), nn.Linear(24, TOKENS)
        self.lstm = nn.LSTM(24, 24, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Sparse(nn.Module):
    """Every micro-batch uses one of four layers, by its first token; some steps leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, TOKENS) for _ in range(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[int(tokens[0, 0]) % len(self.layers)](tokens.float() / TOKENS)


def gan() -> list[nn.Module]:
    generator = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    return [generator, critic]


def sharded() -> nn.Module:
    """The transformer, over a replica of two workers."""
    mesh, model = torchelastic.mesh({"shard": 2}), Transformer()
    for module in (*model.body.layers, model):
        fully_shard(module, mesh=mesh)
    return model


MODELS = {
    "transformer-sharded": sharded,
    "transformer": Transformer,
    "transformer-bf16": Transformer,
    "convolution": Convolution,
    "lstm": Lstm,
    "sparse": Sparse,
}


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Tokens with random changes."""

    def __init__(self, count: int) -> None:
        source = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(TOKENS, (count, WIDTH), generator=source)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self._tokens[index] + torch.randint(2, (WIDTH,))) % TOKENS


class Training:
    """What the modes share."""

    def __init__(self, record: Path, checkpoints: Path) -> None:
        self.log, self._stop = StepLog(record), record / "STOP"
        self.models = gan() if KEYS["model"] == "gan" else [MODELS[KEYS["model"]]()]
        self.optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in self.models]
        self.policy = BatchPolicy.fixed(micro=MICRO, count=KEYS["count"], shares=KEYS["shares"])
        sampler = ElasticSampler(KEYS["samples"], seed=3)
        self.loader = DataLoader(
            Samples(KEYS["samples"]),
            sampler=sampler,
            policy=self.policy,
            num_workers=KEYS["loaders"],
        )
        if KEYS["every"]:
            store = CheckpointStore(str(checkpoints), keep_last=3, every=KEYS["every"])
            set_checkpoint_manager(store)
        self.state = torchelastic.TorchState(
            model=self.models,
            optimizer=self.optimizers,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.99),
            sampler=sampler,
            policy=self.policy,
            ledger=Ledger(record.parent / "ledger"),
            guard=torchelastic.Guard(audit=KEYS["audit"]) if KEYS["audit"] else None,
        )
        if KEYS["wrong"]:
            self._wrong = record / "WRONG"
            next(self.models[0].parameters()).register_hook(self._spoil)
        self._batches = iter(self.loader)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        rank, step, how = KEYS["wrong"].split(":")
        if os.environ["RANK"] != rank or self.state.step < int(step):
            return gradient
        try:
            with self._wrong.open("x") as file:
                file.write(str(os.getpid()))
            self.log.write("wrong", step=self.state.step, rank=int(rank))
        except FileExistsError:
            if how == "once" or self._wrong.read_text() != str(os.getpid()):
                return gradient
        return gradient * (1 + 2**-12)

    def is_over(self, step: int) -> bool:
        try:
            last = int(self._stop.read_text())
        except FileNotFoundError:
            last = KEYS["steps"]
        if step >= last:
            faulthandler.dump_traceback_later(30)  # in case that it does not end
        return step >= last

    def begin(self, step: int) -> None:
        """Write down the weights after as many steps, and evaluate them now and then."""
        own = digest(self.models, self.optimizers)
        if KEYS["model"].endswith("sharded"):  # each worker of the replica has a part
            own = sha256("".join(agreement.gather(own)).encode()).hexdigest()[:16]
        self.log.write("hash", step=step, hash=own)
        if KEYS["evaluate"] and step % KEYS["evaluate"] == 0:
            self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> None:
        """With random numbers, buffers that change, and a collective."""
        model = self.models[0]
        shape = (MICRO, 6) if KEYS["model"] == "gan" else (MICRO, WIDTH)
        tokens = torch.rand(shape) if KEYS["model"] == "gan" else torch.randint(TOKENS, shape)
        model.eval()
        found = model(tokens).float().mean()
        model.train()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found)
        time.sleep(0.02)

    def step(self) -> None:
        batch = self._next_batch()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if KEYS["model"] == "gan":
            self._play(batch)
        else:
            for micro in self._accumulate(batch, self.models[0]):
                micro.backward(loss_of(self.models[0], micro.data))
            nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.5)
            self.optimizers[0].step()
        self.state.scheduler.step()

    def _next_batch(self) -> torch.Tensor:
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)

    def _accumulate(self, batch: torch.Tensor, model: nn.Module) -> Iterator[Any]:
        slow = os.environ["RANK"] in str(KEYS["slow"]).split(",")
        for micro in self.policy.accumulate(batch, model, total=self.loader.total):
            time.sleep(KEYS["wait"] * (KEYS["slowness"] if slow else 1))
            yield micro
            self.log.write("ran", samples=micro.samples)

    def _play(self, batch: torch.Tensor) -> None:
        """The critic's loop, and then the generator's."""
        generator, critic = self.models
        critic.requires_grad_(True)  # an interrupted step may have left it off
        for micro in self._accumulate(batch, critic):
            real, noise = micro.data.float() / TOKENS, torch.randn(micro.samples, 6)
            made = generator(noise).detach()
            micro.backward(critic(made).mean() - critic(real).mean() + critic(real).pow(2).mean())
        self.optimizers[1].step()
        critic.requires_grad_(False)
        for micro in self._accumulate(batch, generator):
            micro.backward(-critic(generator(torch.randn(micro.samples, 6))).mean())
        self.optimizers[0].step()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """A loss that also depends on Python's and numpy's random numbers."""
    with torch.autocast("cpu", torch.bfloat16, enabled=KEYS["model"].endswith("bf16")):
        found = model(tokens)
    targets = tokens.roll(1, 1) if found.dim() == 3 else tokens[:, 0]
    loss = nn.functional.cross_entropy(found.float().flatten(0, -2), targets.flatten())
    return loss * (1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))


def digest(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> str:
    found = sha256()
    for model in models:
        for one in model.state_dict().values():
            found.update(local_or_whole(one).numpy().tobytes())
    for optimizer in optimizers:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                found.update(name.encode() + local_or_whole(value).numpy().tobytes())
    return found.hexdigest()[:16]


def train(training: Training) -> None:
    log = training.log

    def train_step(state: torchelastic.TorchState) -> None:
        began = time.monotonic()
        world = session.current()
        log.in_world(world.generation, world.rank, world.size, world.generation)
        with session.unhurried():
            training.begin(state.step)
        if training.is_over(state.step):
            raise StopIteration
        training.step()
        log.step(state.step + 1, began)

    torchelastic.train(CoordinatorP2P(), train_step, training.state)


def keep(training: Training) -> None:
    dist.init_process_group("gloo")
    step = training.state.restore()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    training.log.in_world(generation, dist.get_rank(), dist.get_world_size(), generation)
    while True:
        began = time.monotonic()
        training.begin(step)
        if training.is_over(step):
            break
        training.step()
        training.state.commit()
        step += 1
        training.log.step(step, began)


def ddp(log: StepLog) -> None:
    """Adds the same micro-batches in DDP's order."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    log.in_world(0, rank, size, 0)
    model = MODELS[KEYS["model"]]()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Samples(KEYS["samples"])
    share = KEYS["count"] // size
    for step in range(KEYS["steps"]):
        log.write("hash", step=step, hash=digest([model], [optimizer]))
        optimizer.zero_grad()
        for number in range(rank * share, (rank + 1) * share):
            for source in (torch.manual_seed, random.seed, numpy.random.seed):
                source(1000 * step + number)
            tokens = torch.stack(
                [samples[index % 100] for index in range(4 * number, 4 + 4 * number)]
            )
            is_last = number == (rank + 1) * share - 1
            with nullcontext() if is_last else wrapped.no_sync():
                (loss_of(wrapped, tokens) / share).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_args()
    for name, _, value in (one.partition("=") for one in arguments.keys):
        KEYS[name] = type(KEYS[name])(value)
    fixed_sums.BUCKET_BYTES, fixed_steps.MEASURE_EVERY = KEYS["bucket"], KEYS["measure"]
    torch.set_num_threads(1)
    torch.manual_seed(KEYS["seed"])
    if KEYS["mode"] == "ddp":
        ddp(StepLog(arguments.record))
        return
    training = Training(arguments.record, arguments.checkpoint)
    {"train": train, "keep": keep}[KEYS["mode"]](training)
    if KEYS["every"]:
        finish()
    faulthandler.cancel_dump_traceback_later()
    training.log.write("end")


if __name__ == "__main__":
    main()
