"""The workload under NVRx's in-process restart: ranks beyond the active ones are spares."""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch._dynamo  # so that a spare is warm: the first optimizer would import it for a second
import torch.distributed as dist
import workload
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog

#: How often its thread and its process look: 1 s each by default.
LOOK_EVERY = timedelta(milliseconds=50)


def train(
    arguments: argparse.Namespace, log: StepLog, call: inprocess.CallWrapper | None = None
) -> None:
    """Runs anew, in the same process, after every fault; takes up the last checkpoint each time."""
    assert call is not None
    # A connection of its own: the wrapper's is busy waiting for news of faults.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"training-{call.iteration}", store),
        rank=rank,
        world_size=size,
        # It cannot abort gloo: a rank that waits for one that has left waits as long.
        timeout=timedelta(seconds=arguments.collective_timeout),
    )
    model, optimizer = workload.build(arguments.size)
    first = torch.tensor(workload.load(arguments.checkpoint, model, optimizer))
    dist.broadcast(first, src=0)
    step = int(first)
    log.in_world(call.iteration, rank, size, call.iteration)
    wrapped = DistributedDataParallel(model)
    while time.monotonic() < arguments.until:
        began = time.monotonic()
        workload.take_step(wrapped, optimizer, arguments)
        step += 1
        log.step(step, began)
        if rank == 0 and workload.due(arguments.checkpoint_every, step):
            workload.save(arguments.checkpoint, model, optimizer, step)


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--active", type=int, required=True, help="workers that train")
    arguments = parser.parse_args()
    arguments.until = time.monotonic() + arguments.seconds
    log = StepLog(arguments.record)
    wrapper = inprocess.Wrapper(
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(arguments.active),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        monitor_thread_interval=LOOK_EVERY,
        monitor_process_interval=LOOK_EVERY,
        heartbeat_interval=LOOK_EVERY,
        progress_watchdog_interval=LOOK_EVERY,
        last_call_wait=timedelta(0),
        soft_timeout=timedelta(seconds=5),
        hard_timeout=timedelta(seconds=10),
        heartbeat_timeout=timedelta(seconds=5),
    )
    wrapper(train)(arguments, log)


if __name__ == "__main__":
    main()
