"""Steps with a fixed batch and steps of plain DDP in turn, in the same workers.

    bits_cost_train.py --record=DIRECTORY --checkpoint=PATH [key=value ...]

Each way has a model of its own, and accumulates over the same micro-batches: DDP with `no_sync` for
all but the last. A micro-batch sleeps, spread over the forward and backward of its layers, in place
of an accelerator. A line `cost` for each step: its seconds, the CPU seconds of the training thread
and of the whole process, and the bytes that all workers have sent over the loopback interface.

Ways: `fixed`; `ddp`, and `again`, the same once more; `late`, a fixed batch that sends nothing
before the last backward has ended.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog

import torchelastic
from torchelastic.data import BatchPolicy
from torchelastic.training import fixed_sums

KEYS: dict[str, Any] = {
    "ways": "fixed,ddp,again",
    "count": 16,
    "steps": 30,
    "wait": 0.1,
    "width": 1448,
    "depth": 12,
}


class Sleep(torch.autograd.Function):
    """Takes a third of its time in the forward, the rest in the backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds / 3)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds * 2 / 3)
        return gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = KEYS["width"]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(KEYS["depth"]))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = torch.relu(layer(value))
            if KEYS["wait"]:
                value = Sleep.apply(value, KEYS["wait"] / KEYS["depth"])
        return value.square().mean()


class Fixed:
    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.policy = BatchPolicy.fixed(micro=1, count=KEYS["count"], shares="equal")
        self.state = torchelastic.TorchState(
            model=self.model, optimizer=self.optimizer, policy=self.policy
        )
        assert self.policy.steps is not None
        self.steps: Any = self.policy.steps
        self.samples = self.policy.shares(dist.get_world_size())[dist.get_rank()]

    def take_step(self) -> None:
        self.steps.begin()
        self.optimizer.zero_grad()
        batch = torch.ones(max(self.samples, 1), KEYS["width"])
        for micro in self.policy.accumulate(batch, self.model):
            micro.backward(self.model(micro.data))
        self.optimizer.step()
        self.steps.committed()

    def buffers(self) -> int:
        """The bytes that the exchange holds."""
        found = 0
        for _, exchange in self.steps._exchanges.values():
            found += sum(one.nbytes for one in exchange._rooms.values())
            found += sum(one.whole.nbytes for one in exchange.buckets)
        return found


class Late(Fixed):
    """Without sending anything during the backward."""

    def take_step(self) -> None:
        follow, fixed_sums.Round.follow = fixed_sums.Round.follow, lambda *_: None  # type: ignore
        try:
            super().take_step()
        finally:
            fixed_sums.Round.follow = follow  # type: ignore[method-assign]


class Ddp:
    def __init__(self) -> None:
        self.model = DistributedDataParallel(Model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.own = KEYS["count"] * (rank + 1) // size - KEYS["count"] * rank // size

    def take_step(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.ones(self.own, KEYS["width"])
        for number in range(self.own):
            with self.model.no_sync() if number < self.own - 1 else nullcontext():
                (self.model(batch[number : number + 1]) / self.own).backward()
        self.optimizer.step()

    def buffers(self) -> int:
        return 0


def loopback() -> int:
    """The bytes that were sent over the loopback interface of this network namespace."""
    (line,) = (one for one in Path("/proc/net/dev").read_text().splitlines() if " lo:" in one)
    return int(line.split(":")[1].split()[8])


def memory(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(name + ":")[1].split()[0])


def in_turn(names: list[str]) -> Iterator[list[str]]:
    """The ways in an order that changes from step to step."""
    for number in range(KEYS["steps"] + 2):
        first = number % len(names)
        yield names[first:] + names[:first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_args()
    for name, _, value in (one.partition("=") for one in arguments.keys):
        KEYS[name] = type(KEYS[name])(value)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = StepLog(arguments.record)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log.in_world(0, rank, dist.get_world_size(), 0)
    makers = {"fixed": Fixed, "late": Late, "ddp": Ddp, "again": Ddp}
    names = KEYS["ways"].split(",")
    ways: dict[str, Any] = {}
    for name in dict.fromkeys("ddp" if one == "again" else one for one in names):
        ways[name] = makers[name]()
    if "ddp" in ways:
        ways["again"] = ways["ddp"]
    size = sum(one.nbytes for one in ways[names[0]].model.parameters())
    before = memory("VmRSS")
    for number, order in enumerate(in_turn(names)):
        for name in order:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            dist.barrier()
            sent = loopback()
            began = time.monotonic(), time.thread_time(), time.process_time()
            ways[name].take_step()
            thread, process = time.thread_time() - began[1], time.process_time() - began[2]
            dist.barrier()
            wall = time.monotonic() - began[0]
            sent = loopback() - sent
            peak, buffers = memory("VmHWM") - before, ways[name].buffers()
            ways[name].optimizer.zero_grad()
            if number >= 2:  # the first two are not counted
                facts = {"wall": wall, "thread": thread, "process": process, "sent": sent}
                copies = {"peak": peak / size, "buffers": buffers / size}
                log.write("cost", way=name, number=number, size=size, **facts, **copies)
    dist.barrier()
    # The destructor of DDP's group may wait for ever, for a thread that needs the GIL.
    os._exit(0)


if __name__ == "__main__":
    main()
