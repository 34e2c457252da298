"""A worker that trains with a `Guard`, makes some of its numbers bad, and writes the hash of its
state in the end.

bad_steps.py LINES ORDERS ledger=DIRECTORY [key=value ...]

Keys: model (plain, gan, fixed, local: without DDP), mode (train, keep), steps, samples, bad
(RANK:STEP:VALUE[:PLACE][:once], with spaces between several: in that step the loss of that rank is
multiplied; of a gan that of the critic, 0, or the generator, 1; `once`: not when it is repeated),
known (steps whose samples are taken and not used), on_bad, limit, window, check (steps between two
comparisons of states), loss=0 (do not pass the loss), store (a directory for checkpoints), pace
(seconds of a step).
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import worker_side
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_side import write

import torchelastic
from torchelastic import checkpoint
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.tensors.tensor_bytes import sha256_of

KEYS = {"model": "plain", "mode": "train", "steps": 12, "samples": 102, "bad": "", "known": ""}
KEYS |= {"on_bad": "skip", "limit": 10, "window": 128, "check": 0, "loss": 1, "store": ""}
KEYS |= {"pace": 0.0, "ledger": ""}
KEYS |= {name: type(KEYS[name])(value) for name, value in worker_side.KEYS.items()}
torch.set_num_threads(1)
torch.manual_seed(0)


def network(inputs: int, outputs: int) -> nn.Module:
    norm, drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(inputs, 8), norm, nn.ReLU(), drop, nn.Linear(8, outputs))


is_gan, is_fixed, is_kept = KEYS["model"] == "gan", KEYS["model"] == "fixed", KEYS["mode"] == "keep"
networks = [network(4, 6), network(6, 1)] if is_gan else [network(6, 1)]
if is_kept:
    dist.init_process_group("gloo")
    wrapped = not is_fixed and dist.get_world_size() > 1
    networks = [DistributedDataParallel(one) if wrapped else one for one in networks]
optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in networks]
schedulers = [torch.optim.lr_scheduler.StepLR(one, 3, 0.9) for one in optimizers]
data = torch.randn(KEYS["samples"], 6, generator=torch.Generator().manual_seed(1))
sampler = ElasticSampler(len(data), seed=3)
policy = BatchPolicy.fixed(micro=2, count=6) if is_fixed else BatchPolicy.constant_global(12)
loader = DataLoader(data, sampler=sampler, policy=policy)
if KEYS["store"]:
    checkpoint.set_checkpoint_manager(checkpoint.CheckpointStore(KEYS["store"]))
on_bad = (lambda bad: "skip") if KEYS["on_bad"] == "function" else KEYS["on_bad"]
guard = torchelastic.Guard(
    on_bad=on_bad,
    limit=KEYS["limit"],
    window=KEYS["window"],
    min_steps=4,
    check_every=KEYS["check"] or None,
)
state = torchelastic.TorchState(
    model=networks,
    optimizer=optimizers,
    scheduler=schedulers,
    sampler=sampler,
    policy=policy if is_fixed else None,
    ledger=Ledger(KEYS["ledger"]),
    guard=guard,
    ddp=KEYS["model"] != "local",
)
known = [int(one) for one in KEYS["known"].split()]
batches = iter(loader)
made = set()


def next_batch() -> torch.Tensor:
    global batches
    while True:
        try:
            return next(batches)
        except StopIteration:
            batches = iter(loader)
            state.epoch += 1


def factor(step: int, place: int = 0) -> float:
    """What the loss is multiplied by."""
    for one in KEYS["bad"].split():
        rank, at, value, *more = one.split(":")
        where = int(more[0]) if more else 0
        if (int(rank), int(at), where) != (dist.get_rank(), step, place) or one in made:
            continue
        if "once" in more:
            made.add(one)
        write("bad", step=step, rank=int(rank))
        return float(value)
    return 1.0


def take(step: int, place: int, optimizer, loss: torch.Tensor) -> None:
    loss = loss * loader.weight * factor(step, place)
    if KEYS["loss"]:
        guard.loss(loss)
    optimizer.zero_grad()
    loss.backward()
    if KEYS["model"] == "local":
        for parameter in networks[0].parameters():
            dist.all_reduce(parameter.grad)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def one_step(step: int) -> None:
    batch = next_batch()
    time.sleep(KEYS["pace"])
    if step in known:
        return
    if is_gan:
        generator, critic = state.model
        made = generator(torch.randn(len(batch), 4)).detach()
        take(step, 0, optimizers[1], (critic(made) - critic(batch)).mean())
        take(step, 1, optimizers[0], -critic(generator(torch.randn(len(batch), 4))).mean())
    elif is_fixed:
        optimizers[0].zero_grad()
        for number, micro in enumerate(policy.accumulate(batch, networks[0], total=loader.total)):
            loss = state.model[0](micro.data).square().mean()
            micro.backward(loss * (factor(step) if number == 1 else 1.0))
        nn.utils.clip_grad_norm_(networks[0].parameters(), 1.0)
        optimizers[0].step()
    else:
        take(step, 0, optimizers[0], state.model[0](batch).square().mean())
    for scheduler in schedulers:
        scheduler.step()


def digest() -> str:
    solid = state._solid()
    objects = {name: one for name, one in solid["objects"].items() if name != "guard"}
    return sha256_of([solid["model"], solid["optimizer"], objects, solid["values"]])


if is_kept:
    first = state.restore()
    write("restored", step=first)
    for step in range(first, KEYS["steps"]):
        one_step(step)
        state.commit()
else:

    def train_step(state: torchelastic.TorchState) -> None:
        if state.step == KEYS["steps"]:
            raise StopIteration
        write("step", step=state.step, rank=int(os.environ["RANK"]))
        one_step(state.step)

    torchelastic.train(CoordinatorP2P(), train_step, state)
weights = sha256_of([list(one.parameters()) for one in networks])
who = int(os.environ["RANK"])
write("done", rank=who, digest=digest(), weights=weights, step=state.step, bad=guard.history.bad)
