"""What every training script of the benchmarks does: the model, its step, the log, a checkpoint.

Imports torch and nothing else of the project. Scripts differ in who keeps their workers training,
and in nothing else: the same model, the same batch, the same line in the log at the same place.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from sizes import OUTPUTS, SIZES, Size
from torch import nn


def build(size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, before anybody wraps them."""
    layers: list[nn.Module] = []
    for _ in range(size.depth):
        layers += [nn.Linear(size.width, size.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(size.width, OUTPUTS))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> None:
    """One step on a random batch, and the time an accelerator would have taken for it."""
    size: Size = arguments.size
    optimizer.zero_grad()
    output, target = model(torch.randn(size.batch, size.width)), torch.zeros(size.batch, OUTPUTS)
    nn.functional.mse_loss(output, target).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(arguments.accelerator)


class StepLog:
    """JSON lines of one worker, in a file that no other process writes.

    Each line is one write, so a killed worker leaves whole lines. The times are CLOCK_MONOTONIC,
    which all processes of a machine share; `cpu` is the processor time of the writing thread.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{os.getpid()}-{time.monotonic_ns()}.jsonl").open("ab", 0)
        self._who = {"pid": os.getpid()}

    def in_world(self, world: int, rank: int, size: int, generation: int) -> None:
        """Every further line carries these; no other world of the job has the number `world`."""
        self._who.update(world=world, rank=rank, size=size, generation=generation)

    def write(self, event: str, **facts: float | str) -> None:
        stamps = {"t": time.monotonic(), "cpu": time.thread_time()}
        line = {**stamps, "event": event, **self._who, **facts}
        self._file.write(json.dumps(line).encode() + b"\n")

    def step(self, number: int, began: float, **facts: float) -> None:
        """As many steps are committed; called at the end of the last of them."""
        self.write("step", step=number, began=began, **facts)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the checkpoint, if there is one; return the number of steps it holds."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def due(every: int, step: int) -> bool:
    """Whether a checkpoint is to be written after this step."""
    return every > 0 and step % every == 0


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint so that a kill at any moment leaves the old one or the new one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save(state, beside)
    beside.replace(path)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments every script has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--record", type=Path, required=True, help="directory of the step logs")
    made.add_argument("--checkpoint", type=Path, required=True)
    made.add_argument("--size", type=_size, default="small", help=", ".join(SIZES))
    made.add_argument(
        "--accelerator",
        type=float,
        default=0.01,
        help="a step sleeps as long: the time a real one spends on an accelerator",
    )
    made.add_argument("--checkpoint-every", type=int, default=5, help="steps (0: never)")
    made.add_argument(
        "--collective-timeout", type=float, default=5, help="seconds, where the script sets it"
    )
    made.add_argument("--steps", type=int, default=0, help="stop after as many (0: no limit)")
    made.add_argument("--seconds", type=float, default=900, help="stop after as long")
    return made


def _size(name: str) -> Size:
    if name not in SIZES:
        raise argparse.ArgumentTypeError(f"no such size: {name}")
    return SIZES[name]
