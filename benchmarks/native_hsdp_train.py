"""The sharded workload as torch does it alone: `fully_shard` on a mesh of replicas and shards.

It imports torch only, runs under any launcher, and resumes from its own checkpoint, written by
torch.distributed.checkpoint.
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import sharded_workload
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_train import agree
from sizes import SHARDS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from workload import StepLog, due


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Collective: write a checkpoint of this step; the one before stays until it is complete."""
    parts, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": of_optimizer}, checkpoint_id=path / str(step))
    if dist.get_rank() == 0:
        for older in sorted(path.iterdir(), key=lambda each: int(each.name))[:-1]:
            shutil.rmtree(older)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Collective: take up the last complete checkpoint; return its step."""
    path.mkdir(exist_ok=True)
    complete = [int(each.name) for each in path.iterdir() if (each / ".metadata").exists()]
    _, step = agree(max(complete, default=0))
    if step:
        parts, of_optimizer = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parts, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=path / str(step))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    return step


def collectives() -> int:
    """How many this worker has launched, in all of its groups."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(int(group._get_sequence_number_for_group()) for group in groups)


def train(arguments: argparse.Namespace, log: StepLog) -> None:
    sizes = (dist.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model, optimizer = sharded_workload.build(arguments, mesh)
    step = load(arguments.checkpoint, model, optimizer)
    world, _ = agree(step)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log.in_world(world, dist.get_rank(), dist.get_world_size(), generation)
    last = step + arguments.steps if arguments.steps else float("inf")
    until = time.monotonic() + arguments.seconds
    while step < last and time.monotonic() < until:
        began = time.monotonic()
        sharded_workload.take_step(model, optimizer, arguments.size)
        step += 1
        log.step(step, began, collectives=collectives())
        if due(arguments.checkpoint_every, step):
            save(arguments.checkpoint, model, optimizer, step)


def main() -> None:
    arguments = sharded_workload.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    log = StepLog(arguments.record)
    dist.init_process_group("gloo")
    train(arguments, log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
