"""FSDP2 in a training whose steps may be aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchelastic import torch_private
from torchelastic.training.group import abortable_waits


class FullyShardedModels:
    """The FSDP2 modules of some models."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.modules = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, FSDPModule)
        ]
        inner = {
            id(part) for module in self.modules for part in module.modules() if part is not module
        }
        self.roots = [module for module in self.modules if id(module) not in inner]

    def hook(self, average: Callable[[torch.Tensor], None]) -> None:
        """Call this with the reduced gradients of each module, in every backward that reduces."""
        for module in self.modules:
            module.set_all_reduce_hook(average)

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters that FSDP2 reduces the gradients of."""
        return {
            id(parameter)
            for module in self.modules
            for parameter in torch_private.fsdp_parameters(module)
        }

    @property
    def reduces(self) -> bool:
        """Whether the next backward reduces gradients: `set_requires_gradient_sync`."""
        # Ask all modules: a root without parameters of its own does not have the setting.
        return all(torch_private.fsdp_reduces(module) for module in self.modules)

    def reset(self) -> None:
        """Forget the step that was interrupted: all parameters are sharded again, and gradients
        that were not reduced yet are dropped."""
        parameters = [p for one in self.modules for p in torch_private.fsdp_parameters(one)]
        gradients = [parameter.grad for parameter in parameters]
        with abortable_waits.ignoring_failures():
            for root in filter(torch_private.fsdp_has_run, self.roots):
                root.reset_iter_state()
        for module in self.modules:
            torch_private.fsdp_forget_gradients(module)
        # From 2.14 on a reset drops these, too; some may be of an earlier step.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
