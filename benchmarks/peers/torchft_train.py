"""The workload under torchft: this process is one replica group of one worker."""

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import workload
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workload import StepLog

#: torchft's default. A shorter one does not help: the lighthouse waits for a beat to lapse.
HEARTBEAT_INTERVAL = timedelta(milliseconds=100)


def make_manager(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    store: dist.TCPStore,
    collective_timeout: timedelta,
    **options: Any,
) -> Manager:
    """Keeps the quorum, and heals this replica, or its part of one, with a peer's state."""

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=collective_timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        heartbeat_interval=HEARTBEAT_INTERVAL,
        **options,
    )


def train(arguments: argparse.Namespace, log: StepLog, manager: Manager, **parts: Any) -> None:
    model = DistributedDataParallel(manager, parts["model"])
    optimizer = Optimizer(manager, parts["optimizer"])
    while time.monotonic() < arguments.until:
        began = time.monotonic()
        before = manager.current_step()
        workload.take_step(model, optimizer, arguments)
        step = manager.current_step()
        rank = manager.participating_rank()
        if step > before and rank is not None:  # committed, and not by others for a newcomer
            quorum = manager._quorum_id
            log.in_world(quorum, rank, manager.num_participants(), quorum)
            log.step(step, began)


def main() -> None:
    arguments = workload.parser(__doc__).parse_args()
    arguments.until = time.monotonic() + arguments.seconds
    log = StepLog(arguments.record)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, optimizer = workload.build(arguments.size)
    timeout = timedelta(seconds=arguments.collective_timeout)
    manager = make_manager(model, optimizer, store, timeout, rank=0, world_size=1)
    train(arguments, log, manager, model=model, optimizer=optimizer)
    manager.shutdown()


if __name__ == "__main__":
    main()
