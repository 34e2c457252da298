"""A worker that keeps a record of its own of what it was handed, what it used and what it became.

    chaos_worker.py MODE RECORD ORDERS LEDGER [key=value ...]

MODE is `script` (run + keep: restore and commit), `train` (in-process) or `sharded` (also, with a
model that is sharded over replicas; key `mesh`, such as shard:2,tensor:2). Its record is a file for
each process in RECORD, which torchelastic knows nothing of (`chaos_record` reads it). ORDERS has

    gate      a number: no step from this one on is begun
    fault     what a worker does to itself: see `obey`; claimed by one, and gone then
    entering  the same, for one that is on its way into the next world
    epochs    a number: how many there are

The model counts: its parameter `counts` ends up with how often each sample was used, exactly, in
worlds of any size. So the parameters themselves prove what the model has seen.

Keys: node, its number; loaders, loading processes; samples, batch; checkpoints, a directory, and
every, steps from one to the next; pace, seconds that each step takes at least. For `sharded`:
micro, microbatches of a step; recompute, frozen, whole (parameters stay whole until the backward).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as activations

import torchelastic
from torchelastic import checkpoint, faults
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.data.own_rank import own_rank
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

MODE, RECORD, ORDERS, LEDGER = sys.argv[1], *map(Path, sys.argv[2:5])
if MODE == "sharded":  # a second to import
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
KEYS = dict(text.split("=", 1) for text in sys.argv[5:])
SAMPLES, BATCH = int(KEYS.get("samples", "96")), int(KEYS.get("batch", "8"))


# --- the record -----------------------------------------------------------------------------------

_files: dict[int, int] = {}


def write(event: str, **more: object) -> None:
    """A whole line at once. Loading processes have files of their own."""
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = os.open(RECORD / f"{pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[pid], json.dumps({"event": event, "pid": pid, **more}).encode() + b"\n")


class Items(torch.utils.data.Dataset):
    """Each item handed out has a number of its own, and is written down."""

    def __init__(self) -> None:
        self._handed = count()
        #: By process: this object is copied into loading processes. The kernel reuses process ids,
        #: so items are numbered from the clock on.
        self._first: dict[int, int] = {}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> torch.Tensor:
        first = self._first.setdefault(os.getpid(), time.monotonic_ns())
        serial = first + next(self._handed)
        write("item", item=[sample, os.getpid(), serial])
        return torch.tensor([sample, os.getpid(), serial])


def fingerprint() -> str:
    """The bits of the parameters; of a sharded model those that this worker has."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(own(parameter).numpy().tobytes())
    return digest.hexdigest()[:16]


# --- the training ---------------------------------------------------------------------------------


class Counting(nn.Module):
    """`counts` are whole numbers; `tangle` has odd ones, so that equal bits mean something."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))
        self.tangle = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 4))

    def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.stack([samples.sin(), samples.cos(), (samples * 7).sin()], 1)
        if "recompute" in KEYS:
            tangled = activations.checkpoint(self.tangle, features, use_reentrant=False)
        else:
            tangled = self.tangle(features)
        return self.counts[samples].sum(), tangled.square().mean()


class Halfway(torch.optim.SGD):
    """Passes a fault point when half of its parameters are written."""

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            if number:
                faults.at("optimizer.inside")
            for one in group["params"]:
                pull = self.state[one].setdefault("pull", torch.zeros_like(one))
                pull.mul_(group["momentum"]).add_(one.grad)
                one.add_(pull, alpha=-group["lr"])


def take() -> torch.Tensor:
    """The next batch; after the last epoch StopIteration."""
    global batches
    try:
        return next(batches)
    except StopIteration:
        if sampler.epoch >= number_in("epochs", 1 << 30):
            raise
        batches = iter(loader)
        return next(batches)


def parts_of(samples: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """The microbatches of a step, and whether each is the last."""
    parts = samples.chunk(min(int(KEYS.get("micro", "1")), len(samples)))
    return [(part, number == len(parts)) for number, part in enumerate(parts, 1)]


def one_step(wrapped: nn.Module, who: dict[str, int]) -> None:
    """Take, write down, forward and backward, write parameters, write down."""
    before = fingerprint()
    batch = take()
    used = batch.tolist() if loader.weight else []
    write("used", items=used, before=before, **who)
    time.sleep(float(KEYS.get("pace", "0")))
    is_used = float(bool(loader.weight))
    optimizer.zero_grad()
    for part, is_last in parts_of(batch[:, 0]):
        if MODE == "sharded":
            wrapped.set_requires_gradient_sync(is_last)
        counted, tangled = wrapped(part)
        # DDP divides by the size: what comes out is one for each sample, to the bit.
        (tangled * loader.weight - counted * own_rank().size * is_used).backward()
    optimizer.step()
    write("done", hash=fingerprint(), at=time.monotonic(), **who)


# --- orders ---------------------------------------------------------------------------------------

#: Whether this process freezes itself in the step that it takes, and whether it kills itself in a
#: collective, which the step may not have.
freezes = dies_in_collective = False


def number_in(name: str, otherwise: int) -> int:
    try:
        return int((ORDERS / name).read_text())
    except FileNotFoundError:
        return otherwise


def wait_at_gate(who: dict[str, int]) -> None:
    write("gate", node=int(KEYS["node"]), local_rank=local_rank(), epoch=sampler.epoch, **who)
    while who["step"] >= number_in("gate", 0):
        if session.is_entered():
            session.current().group.waits.check()  # somebody else is lost: no use in waiting
        time.sleep(0.003)


def obey(name: str, rank: int, size: int) -> None:
    """Claim an order that is for this rank: `NUMBER TARGET FIRST FAULT`.

    It is for rank TARGET modulo the size of the world; if FIRST is 1, for the first worker on the
    node of that rank. `FAULT` is one of `faults`, or `kill@here`.
    """
    try:
        number, target, first, fault = (ORDERS / name).read_text().split()
        wanted = int(target) % size
        if int(first):
            local_size = int(os.environ["LOCAL_WORLD_SIZE"])
            mine = local_rank() == 0 and rank <= wanted < rank + local_size
        else:
            mine = rank == wanted
        if not mine:
            return
        (ORDERS / name).rename(ORDERS / f"claimed-{number}-{os.getpid()}")
    except FileNotFoundError:
        return
    if fault == "kill@here":
        os.kill(os.getpid(), signal.SIGKILL)
    global freezes, dies_in_collective
    freezes = fault.startswith("stop")
    dies_in_collective = name == "fault" and fault.startswith("kill@place=collective")
    faults.plan(f"{fault},generation=any")


def thaw() -> None:
    """Who has been frozen is not frozen again in the next step."""
    global freezes
    if freezes:
        freezes = False
        faults.plan("")


def local_rank() -> int:
    return session.current().local_rank if session.is_entered() else int(os.environ["LOCAL_RANK"])


# --- the two modes --------------------------------------------------------------------------------


def train_step(state: torchelastic.TorchState) -> None:
    here = session.current()
    who = {"generation": here.generation, "step": state.step, "rank": here.rank, "size": here.size}
    if here.replica is not None:
        reader = own_rank().rank if here.replica.is_recorder else -1
        who |= {"part": here.rank % here.replica.size, "reader": reader}
    with session.unhurried():
        wait_at_gate(who)
    obey("fault", here.rank, here.size)
    obey("entering", here.rank, here.size)
    one_step(state.model, who)
    if dies_in_collective:  # and has not: there were fewer
        os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    state = torchelastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, ledger=Ledger(LEDGER)
    )
    torchelastic.train(CoordinatorP2P(), train_step, state)
    write("end", step=state.step, epoch=sampler.epoch, counts=counted_here())


def counted_here() -> list[float | None]:
    """How often each sample was used; None where another worker has the count."""
    counts: list[float | None] = [None] * SAMPLES
    mine = own(model.counts).tolist()
    first = (
        0 if MODE != "sharded" else device_mesh["shard"].get_local_rank() * -(-SAMPLES // SHARDS)
    )
    counts[first : first + len(mine)] = mine
    return counts


def own(parameter: torch.Tensor) -> torch.Tensor:
    """This worker's part of a parameter."""
    whole = parameter.detach()
    return whole.to_local().contiguous() if hasattr(whole, "to_local") else whole


def sharded(sizes: dict[str, int]) -> None:
    """Shard the model over this worker's replica."""
    if "tensor" in sizes:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model.tangle, device_mesh["tensor"], plan, src_data_rank=None)
    if "frozen" in KEYS:
        model.tangle[0].requires_grad_(False)
    for module in (model.tangle, model):
        fully_shard(module, mesh=device_mesh["shard"], reshard_after_forward="whole" not in KEYS)


def script() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    kept = torchelastic.TorchState(
        model=wrapped, optimizer=optimizer, sampler=sampler, ledger=Ledger(LEDGER)
    )
    obey("entering", rank, size)
    faults.at("sync.begin")
    start = kept.restore()
    faults.at("sync.end")
    write("start", generation=generation, step=start, rank=rank, size=size)
    optimizer.register_step_pre_hook(lambda *_: faults.at("optimizer.before"))
    optimizer.register_step_post_hook(lambda *_: faults.at("optimizer.after"))
    try:
        while True:
            who = {"generation": generation, "step": kept.step, "rank": rank, "size": size}
            wait_at_gate(who)
            obey("fault", rank, size)
            faults.at("step.begin")
            one_step(wrapped, who)
            thaw()
            kept.commit()
            write("committed", **who)
            faults.at("step.end")
    except StopIteration:
        write("end", step=kept.step, epoch=sampler.epoch, counts=counted_here())
    checkpoint.finish()
    dist.barrier()
    dist.destroy_process_group()


torch.set_num_threads(1)
warnings.simplefilter("ignore", FutureWarning)  # torch's, of the name broadcast_buffers
torch.manual_seed(5)
model = Counting()
if MODE == "sharded":
    sizes = {name: int(size) for name, size in (one.split(":") for one in KEYS["mesh"].split(","))}
    SHARDS, device_mesh = sizes["shard"], torchelastic.mesh(sizes)
    sharded(sizes)
tangled = [one for one in model.tangle.parameters() if one.requires_grad]
groups = [
    {"params": [model.counts], "lr": 1.0, "momentum": 0.0},
    {"params": tangled, "lr": 0.01, "momentum": 0.9},
]
optimizer = Halfway(groups, lr=1.0)
sampler = ElasticSampler(SAMPLES, seed=3)
loaders = int(KEYS.get("loaders", "0"))
loader = DataLoader(
    Items(),
    sampler=sampler,
    policy=BatchPolicy.constant_global(BATCH),
    num_workers=loaders,
    persistent_workers=loaders > 0,
)
batches = iter(loader)
if "checkpoints" in KEYS:
    store = checkpoint.CheckpointStore(KEYS["checkpoints"], keep_last=3, every=int(KEYS["every"]))
    checkpoint.set_checkpoint_manager(store)

{"script": script, "train": train, "sharded": train}[MODE]()
