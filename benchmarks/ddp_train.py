"""A plain DDP training script: it imports torch only and runs under any launcher.

It resumes from its own checkpoint and appends one JSON line per step to a file of its own, so
that what a fault has cost can be read from the workers' logs and from nothing else.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog


def agree(first_step: int) -> tuple[int, int]:
    """Rank 0's name for this world, and the step all ranks begin at.

    Launchers number their generations differently (torchrun: per agent), so the world names itself.
    """
    facts = torch.tensor([time.monotonic_ns(), first_step])
    dist.broadcast(facts, src=0)
    return int(facts[0]), int(facts[1])


def train(arguments: argparse.Namespace, log: StepLog) -> None:
    model, optimizer = workload.build(arguments.size)
    world, step = agree(workload.load(arguments.checkpoint, model, optimizer))
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log.in_world(world, dist.get_rank(), dist.get_world_size(), generation)
    log.write("ready")
    wrapped = DistributedDataParallel(model)
    group = dist.distributed_c10d._get_default_group()
    last = step + arguments.steps if arguments.steps else float("inf")
    while step < last and time.monotonic() < arguments.until:
        began = time.monotonic()
        workload.take_step(wrapped, optimizer, arguments)
        step += 1
        log.step(step, began, collectives=group._get_sequence_number_for_group())
        if dist.get_rank() == 0 and workload.due(arguments.checkpoint_every, step):
            workload.save(arguments.checkpoint, model, optimizer, step)


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--then-sleep", action="store_true", help="stay, idle, after the last step")
    arguments = parser.parse_args()
    arguments.until = time.monotonic() + arguments.seconds
    torch.manual_seed(int(os.environ["RANK"]))
    log = StepLog(arguments.record)
    log.write("start")
    dist.init_process_group("gloo")
    train(arguments, log)
    if arguments.then_sleep:
        log.write("idle")
        time.sleep(max(0, arguments.until - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
