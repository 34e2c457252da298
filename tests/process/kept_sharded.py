"""A plain script that keeps sharded state: FSDP2 over gloo, with or without tensor parallelism, and
a line for all that is seen.

    kept_sharded.py LINES ORDERS [key=value ...]

Keys: steps; hold, steps before which it waits for the order `go-STEP`, once all that is done and
copies of it are in memory; mesh=2d, hybrid sharding where the number of ranks is even: two groups
of ranks that are replicas of each other; mesh=tp, two ranks share every linear layer, column-wise
and row-wise, under FSDP2, but not once the order `no-tp` is given; checkpoints, a directory for one
of every second step, or every=N, waited for each time; kept, how many of the first steps are surely
kept: none is committed before the one before it is in memory.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from worker_side import GENERATION, HERE, KEYS, SIZE, is_ordered, wait_for_order, write

import torchelastic
from torchelastic import checkpoint
from torchelastic.snapshot import leave
from torchelastic.snapshot.writer import ShardStatus

STEPS = int(KEYS["steps"])
HOLD = KEYS.get("hold", "").split(",")
KEPT = int(KEYS.get("kept", "0"))
tell = partial(write, **HERE)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fingerprint() -> str:
    """Of parameters and optimizer state, gathered from all ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
        for tensor in tensors:
            digest.update(whole(tensor.detach()).numpy().tobytes())
    return digest.hexdigest()[:16]


def is_safe() -> bool:
    writer = kept._keeper._writer
    return writer is None or writer.shard_status() == ShardStatus.DONE


def wait_until_safe() -> None:
    while not is_safe():
        time.sleep(0.005)


def hold() -> None:
    print_of = fingerprint()
    wait_until_safe()
    tell("holding", step=kept.step, fingerprint=print_of)
    wait_for_order(f"go-{kept.step}")


torch.set_num_threads(1)
leave.STOP_OF_ALL_NODES = 30.0  # a busy agent may take longer to hear of its node's end
dist.init_process_group("gloo")
torch.manual_seed(1 + GENERATION)  # what is built must not matter after a restart
# Sizes that no world divides (two ranks divide one of them), and one tensor that is copied behind
# the next step.
model = nn.Sequential(nn.Linear(7, 150), nn.ReLU(), nn.Linear(150, 149), nn.Linear(149, 3))
SHAPES = {"2d": (2, SIZE // 2), "tp": (SIZE // 2, 2)}
kind = KEYS.get("mesh", "")
if SIZE % 2 or is_ordered("no-tp"):
    kind = ""
mesh = init_device_mesh(
    "cpu", SHAPES.get(kind, (SIZE,)), mesh_dim_names=("a", "b")[: 1 + bool(kind)]
)
if kind == "tp":
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["b"], plan)
    mesh = mesh["a"]
for layer in (model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
if "checkpoints" in KEYS:
    store = checkpoint.CheckpointStore(
        KEYS["checkpoints"], every=int(KEYS.get("every", "2")), patience=60
    )
    checkpoint.set_checkpoint_manager(store)
kept = torchelastic.TorchState(model=model, optimizer=optimizer)
start = kept.restore()
placements = [type(one).__name__ for one in model[0].weight.placements]
tell("start", step=start, fingerprint=fingerprint(), placements=placements)
for step in range(start, STEPS):
    if str(step) in HOLD:
        hold()
    torch.manual_seed(step)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    # Before it is committed: it may be killed in between.
    tell("step", step=step + 1, fingerprint=fingerprint())
    with torch.no_grad():
        model(torch.randn(4, 7))  # leaves the last layer whole
    if str(step + 1) in HOLD or step < KEPT:
        wait_until_safe()  # so that this step is kept, too
    kept.commit()
    checkpoint.wait()
tell("end", step=kept.step, fingerprint=fingerprint())
dist.barrier()
dist.destroy_process_group()
