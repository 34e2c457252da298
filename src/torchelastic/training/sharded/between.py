"""The average of gradients between replicas: the same bits as native HSDP on a fixed mesh.

FSDP2 calls `average` with each module's gradients, reduced in this worker's replica. Gradients of
parameters that FSDP2 does not manage are averaged in buckets at the end of each backward. A
gradient that an earlier backward has averaged is equal on all replicas, so averaging it again keeps
it (up to rounding), and gradients may accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchelastic import torch_private
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.training.group import abortable_waits, backward
from torchelastic.training.group.gloo import OwnedGloo

#: The most bytes of gradients in one all-reduce.
BUCKET = 25 << 20


@cache
def options(op: dist.ReduceOp.RedOpType, *, on_host: bool) -> Any:
    """Return the options of an all-reduce: one on the host is waited for at once."""
    made: Any = dist.AllreduceOptions()
    made.reduceOp = op
    made.asyncOp = not on_host
    return made


class Between:
    """Averages between this worker and those with its coordinates in the other replicas."""

    def __init__(self) -> None:
        #: The group in this world; None if there is one replica.
        self.group: OwnedGloo | None = None
        self._held: list[torch.Tensor] = []

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its average over the replicas."""
        if self.group is None:
            return
        op, on_host = dist.ReduceOp.AVG, tensor.device.type == "cpu"
        if tensor.dtype == torch.float16:  # a sum may overflow
            tensor.div_(self.group.size())
            op = dist.ReduceOp.SUM
        work = self.group.allreduce([tensor], options(op, on_host=on_host))
        if not on_host:
            work.wait()
            self._held.append(tensor)  # not done yet, and FSDP2 may give its memory away

    def release(self) -> None:
        """Note that the device has done all that was launched."""
        self._held.clear()


class Buckets:
    """Averages the gradients of some parameters at the end of each backward."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        average: Callable[[torch.Tensor], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._parameters = list(parameters)
        self._average, self._is_wanted = average, is_wanted
        self._queued = False
        #: The ids of the parameters that are trained, or were.
        self._hooked: set[int] = set()
        self._find()

    def begin(self) -> None:
        """Begin a step: a parameter that was frozen so far may be trained from now on."""
        if len(self._hooked) < len(self._parameters):
            backward.watch(id(self), self._find)

    def _find(self) -> None:
        for one in self._parameters:
            if one.requires_grad and id(one) not in self._hooked:
                one.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._hooked.add(id(one))

    def forget(self) -> None:
        """Note that the backward was aborted."""
        self._queued = False

    def _accumulated(self, _: torch.Tensor) -> None:
        if not self._queued and self._is_wanted():
            self._queued = True
            backward.at_end(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued = False
        gradients = [
            local_or_whole(parameter.grad)
            for parameter in self._parameters
            if parameter.grad is not None and parameter.requires_grad
        ]
        for bucket in buckets(gradients, BUCKET):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._average(bucket[0])
                continue
            flat: Any = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._average(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            views = [part.view(one.shape) for part, one in zip(parts, bucket, strict=True)]
            torch_private.copy_all(bucket, views)


def buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors, in order, in lists of one dtype and at most `limit` bytes, or of one."""
    together: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        fits = together and tensor.dtype == together[0].dtype and size + tensor.nbytes <= limit
        if together and not fits:
            yield together
            together, size = [], 0
        together.append(tensor)
        size += tensor.nbytes
    if together:
        yield together


# --- FSDP2 in a training whose steps may be aborted -----------------------------------------------


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
