"""A plain DDP training script: it imports torch only and runs under any launcher.

It resumes from its own checkpoint and appends one JSON line per step to a file of its own, so
that what a fault has cost can be read from the workers' logs and from nothing else.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCELERATOR_SECONDS = 0.01  # a step sleeps as long: the time a real one spends on an accelerator
CHECKPOINT_EVERY = 5


class StepLog:
    """JSON lines of one worker, in a file that no other process writes.

    Each line is one write, so a killed worker leaves whole lines. The times are CLOCK_MONOTONIC,
    which all processes of a machine share.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{os.getpid()}-{time.monotonic_ns()}.jsonl").open("ab", 0)
        self._who = {
            "pid": os.getpid(),
            "rank": int(os.environ["RANK"]),
            "size": int(os.environ["WORLD_SIZE"]),
            "generation": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        }

    def in_world(self, world: int) -> None:
        self._who["world"] = world

    def write(self, event: str, **facts: float) -> None:
        line = {"t": time.monotonic(), "event": event, **self._who, **facts}
        self._file.write(json.dumps(line).encode() + b"\n")


def agree(first_step: int) -> tuple[int, int]:
    """Rank 0's name for this world, and the step all ranks begin at.

    Launchers number their generations differently (torchrun: per agent), so the world names itself.
    """
    facts = torch.tensor([time.monotonic_ns(), first_step])
    dist.broadcast(facts, src=0)
    return int(facts[0]), int(facts[1])


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the checkpoint, if there is one; return the number of steps it holds."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint so that a kill at any moment leaves the old one or the new one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save(state, beside)
    beside.replace(path)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = nn.functional.mse_loss(model(torch.randn(32, 128)), torch.zeros(32, 8))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(ACCELERATOR_SECONDS)


def train(arguments: argparse.Namespace, log: StepLog) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    world, step = agree(load(arguments.checkpoint, model, optimizer))
    log.in_world(world)
    log.write("ready")
    wrapped = DistributedDataParallel(model)
    last = step + arguments.steps if arguments.steps else float("inf")
    while step < last and time.monotonic() < arguments.until:
        began = time.monotonic()
        train_step(wrapped, optimizer)
        step += 1
        log.write("step", step=step, began=began)
        if dist.get_rank() == 0 and step % CHECKPOINT_EVERY == 0:
            save(arguments.checkpoint, model, optimizer, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True, help="directory of the step logs")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="stop after as many (0: no limit)")
    parser.add_argument("--seconds", type=float, default=900, help="stop after as long")
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
