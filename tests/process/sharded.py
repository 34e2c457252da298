"""An in-process worker with a sharded model: a line per step, with the bits of its shards.

    sharded.py LINES ORDERS ledger=DIRECTORY [key=value ...]

Keys: those of `sharded_model.py`; slow (seconds in each step), first (those of generation 0), full
(worlds smaller than this are slow), every (write a checkpoint every so many steps), due (the store
decides, with this interval), stored (wait for it in the next), beside (a group is made in the first
step of each process), late (STEP:RANK,RANK: the last all-reduce of the step fails on these ranks
although it has succeeded on the others), guard, bad (RANK:STEP, the loss there is NaN), known (a
step whose samples are taken and not used).
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from sharded_model import Training
from worker_side import KEYS, ORDERS, write

import torchelastic
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, Ledger
from torchelastic.p2p import CoordinatorP2P
from torchelastic.snapshot.writer import ShardStatus
from torchelastic.training import session
from torchelastic.training.group.group import PeerLostError

training = Training(KEYS)
mesh = torchelastic.mesh(training.mesh)
named = {name: mesh[name] for name in training.mesh}
training.build(named.get("tensor"), named.get("shard"))
sampler = ElasticSampler(training.batch * training.steps)
loader = DataLoader(
    range(training.batch * training.steps),
    sampler=sampler,
    policy=BatchPolicy.constant_global(training.batch),
)
batches = iter(loader)
beside: list[dist.ProcessGroup] = []


def train_step(state) -> None:
    here = session.current()
    taken = next(batches).tolist()
    who = {"step": state.step, "rank": here.rank, "size": here.size, "generation": here.generation}
    taken = taken if loader.weight else []
    write("took", samples=taken, epoch=loader.handed.epoch, **who)
    is_slow = here.size < int(KEYS.get("full", "0"))
    slow = KEYS.get("slow" if here.generation else "first", KEYS.get("slow", "0"))
    time.sleep(0.2 if is_slow else float(slow))
    write_what_is_kept(state, who)
    if "stored" in KEYS:
        torchelastic.checkpoint.wait()
    if "beside" in KEYS:
        if not beside:
            beside.append(dist.new_group())
        dist.all_reduce(torch.zeros(1), group=beside[0])
    training.factor = math.nan if KEYS.get("bad") == f"{here.rank}:{state.step}" else 1.0
    if KEYS.get("known") == str(state.step):
        return
    training.step(taken, loader.weight, lambda: be_late(state, here), state.step)
    write("step", hash=training.fingerprint(), at=time.monotonic(), **who)


def write_what_is_kept(state, who) -> None:
    """Write the step of this worker's last snapshot, once it has its copies."""
    writer = state._sharding.snapshots._writer
    if writer is not None and writer.shard_status() == ShardStatus.DONE and writer._latest:
        write("kept", **{**who, "step": writer._latest[0][1]})


class Late:
    """A group whose all-reduce fails when it is done."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def allreduce(self, *args):
        self.inner.allreduce(*args)  # one that is waited for in this call
        raise PeerLostError("A collective failed: injected")


def be_late(state, here) -> None:
    step, _, ranks = KEYS.get("late", "-1").partition(":")
    if state.step == int(step) and str(here.rank) in ranks.split(",") and not here.generation:
        state._sharding._joint = Late(state._sharding._joint)


more = {"scaler": training.scaler} if training.scaler.is_enabled() else {}
if "guard" in KEYS:
    more["guard"] = torchelastic.Guard()
state = torchelastic.TorchState(
    model=training.model,
    optimizer=training.optimizers,
    scheduler=training.schedulers,
    sampler=sampler,
    ledger=Ledger(KEYS["ledger"]),
    **more,
)
every, due = int(KEYS.get("every", "0")), KEYS.get("due")
if every or due:
    torchelastic.checkpoint.set_checkpoint_manager(
        torchelastic.checkpoint.CheckpointStore(
            str(ORDERS / "checkpoints"), every=int(due) if due and due.isdigit() else due
        )
    )
write("start")
torchelastic.train(CoordinatorP2P(), train_step, state, checkpoint_every=every or None)
write("done", step=state.step, hash=training.fingerprint())
