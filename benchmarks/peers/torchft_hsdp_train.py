"""The sharded workload under torchft: this process is one worker of a replica group.

FSDP2 shards inside the group. Its all-reduce hook averages between groups through the manager, as
torchft's own FSDP test does it.
"""

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import sharded_workload
import torch
import torch.distributed as dist
from sizes import SHARDS
from torch.distributed.device_mesh import init_device_mesh
from torchft import Manager, Optimizer
from torchft_train import make_manager
from workload import StepLog


def average_through(manager: Manager, model: torch.nn.Module) -> None:
    """Average each layer's reduced gradients between the groups."""

    def average(gradients: torch.Tensor) -> None:
        manager.allreduce(gradients).wait()

    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_all_reduce_hook(average)


def train(arguments: argparse.Namespace, log: StepLog, manager: Manager, **parts: Any) -> None:
    model, optimizer = parts["model"], Optimizer(manager, parts["optimizer"])
    average_through(manager, model)
    until = time.monotonic() + arguments.seconds
    while time.monotonic() < until:
        began, before = time.monotonic(), manager.current_step()
        sharded_workload.take_step(model, optimizer, arguments.size)
        step, group = manager.current_step(), manager.participating_rank()
        if step > before and group is not None:  # committed, and not by others for a newcomer
            quorum, shards = manager._quorum_id, SHARDS
            rank = group * shards + dist.get_rank()
            log.in_world(quorum, rank, manager.num_participants() * shards, quorum)
            log.step(step, began)


def main() -> None:
    arguments = sharded_workload.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    log = StepLog(arguments.record)
    timeout = timedelta(seconds=arguments.collective_timeout)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=SHARDS,
    )
    mesh = init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",))
    model, optimizer = sharded_workload.build(arguments, mesh)
    manager = make_manager(
        model,
        optimizer,
        store,
        timeout,
        rank=rank,
        world_size=SHARDS,
        use_async_quorum=False,  # a newcomer has its state before FSDP2 gathers parameters
    )
    train(arguments, log, manager, model=model, optimizer=optimizer)
    manager.shutdown()


if __name__ == "__main__":
    main()
