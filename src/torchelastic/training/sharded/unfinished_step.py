"""A step that other workers may have committed, and that this one can still complete.

A worker whose last all-reduce of a step was aborted does not know whether others have committed the
step. It rolls back, and keeps what it needs to complete the step, until the next world knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from torchelastic.tensors.small_state import Hyperparameters
from torchelastic.training.undo.writes import OptimizerCopy


class Completion(Protocol):
    """The way to complete a step that was rolled back."""

    def complete(self) -> None:
        """Bring parameters and optimizer state to the end of the step."""


#: The attributes through which a GradScaler tells a fused optimizer to unscale the gradients.
_SCALING = ("grad_scale", "found_inf")


class FromGradients:
    """The reduced gradients, and the hyperparameters, that one optimizer was about to use."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        scaling = {name: getattr(optimizer, name, None) for name in _SCALING}
        self._scaling = {name: one.clone() for name, one in scaling.items() if one is not None}
        hyperparameters = Hyperparameters(optimizer)
        self._hyperparameters = hyperparameters.save()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None  # the rollback must not write to it

    def complete(self) -> None:
        kept = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        hyperparameters = Hyperparameters(self._optimizer)
        before = hyperparameters.save()
        hyperparameters.restore(self._hyperparameters)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        vars(self._optimizer).update(self._scaling)
        self._optimizer.step()
        for name in self._scaling:
            delattr(self._optimizer, name)
        for parameter, gradient in kept:
            parameter.grad = gradient
        hyperparameters.restore(before)


class Unwritten:
    """The gradients of a step in which no optimizer wrote, because it accumulates them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._gradients = [
            (parameter, parameter.grad)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        for parameter, _ in self._gradients:
            parameter.grad = None  # the rollback must not write to it

    def complete(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class FromCopies(Unwritten):
    """Copies of parameters and optimizer state after the step, and the gradients: one optimizer may
    accumulate them while another writes."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers)
        self._copies = [OptimizerCopy(optimizer) for optimizer in optimizers]
        for copy in self._copies:
            copy.take()

    def complete(self) -> None:
        super().complete()
        for copy in self._copies:
            copy.undo()
