"""The sharded model and its step, for all training scripts of `sharded.py`.

Imports torch and nothing else of the project. Compute is a sleep in the forward and backward of
each layer, so collectives are spread over the step as on an accelerator, and eight processes on two
cores do not measure the scheduler.
"""

import argparse
import time
from typing import Any

import torch
import workload
from sizes import OUTPUTS, Size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

#: The width of a layer that no step uses.
IDLE_WIDTH = 2048


class SlowRelu(torch.autograd.Function):
    """A ReLU that sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        output = x.relu()
        context.save_for_backward(output)
        context.seconds = seconds
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        (output,) = context.saved_tensors
        return gradient * (output > 0), None


class Layer(nn.Linear):
    """A layer that takes as long as it would on an accelerator."""

    def __init__(self, width: int, outputs: int, seconds: float) -> None:
        super().__init__(width, outputs)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return SlowRelu.apply(x, self.seconds)


class Model(nn.Module):
    """Layers, and others that no step uses, like experts that get no tokens."""

    def __init__(self, size: Size, seconds: float, idle: int) -> None:
        super().__init__()
        outputs = [size.width] * size.depth + [OUTPUTS]
        each = seconds / 3 / len(outputs)
        self.layers = nn.Sequential(*(Layer(size.width, out, each) for out in outputs))
        self.idle = nn.ModuleList(nn.Linear(IDLE_WIDTH, IDLE_WIDTH) for _ in range(idle))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build(
    arguments: argparse.Namespace, mesh: DeviceMesh
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, each layer sharded over the mesh, and its optimizer; the same on all workers."""
    torch.manual_seed(0)
    model = Model(arguments.size, arguments.accelerator, arguments.idle)
    for layer in (*model.layers, *model.idle):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, size: Size) -> None:
    """One step on a random batch."""
    optimizer.zero_grad()
    model(torch.randn(size.batch, size.width)).square().mean().backward()
    optimizer.step()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments every script has."""
    made = workload.parser(description)
    made.add_argument("--idle", type=int, default=0, help="layers of 17 MB that no step uses")
    made.set_defaults(accelerator=0.05, checkpoint_every=10)
    return made
