"""`ddp_train.py` with three lines more: its state is kept in its agent's memory, not on a disk."""

import os
import time

import torch
import torch.distributed as dist
import workload
from ddp_train import agree
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog

import torchelastic


def main() -> None:
    arguments = workload.parser(__doc__).parse_args()
    until = time.monotonic() + arguments.seconds
    torch.manual_seed(int(os.environ["RANK"]))
    log = StepLog(arguments.record)
    log.write("start")
    dist.init_process_group("gloo")
    model, optimizer = workload.build(arguments.size)
    wrapped = DistributedDataParallel(model)
    kept = torchelastic.TorchState(model=wrapped, optimizer=optimizer)
    world, step = agree(kept.restore())
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log.in_world(world, dist.get_rank(), dist.get_world_size(), generation)
    log.write("ready")
    while time.monotonic() < until:
        began = time.monotonic()
        workload.take_step(wrapped, optimizer, arguments)
        kept.commit()
        step += 1
        log.step(step, began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
