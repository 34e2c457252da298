"""Gradients as they were at the beginning of a step, without a copy in the usual patterns.

If a job zeroes gradients at the end of a step, they are None at the beginning, and None is all
there is to put back. If it zeroes them at the start, they hold values that nothing will read: there
is nothing to put back. The values matter only when a backward adds to what an earlier step left. A
hook on each parameter runs just before that, and makes the copy. The hooks are installed when a
backward begins while there are such values: a job that zeroes all gradients at the start or the
end never pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch

from torchelastic.tensors.dtensors import is_sharded, local_or_whole, zeros_like
from torchelastic.torch_private import version_of
from torchelastic.training.group import backward

_Mark = tuple[int, int]


class Gradients:
    """The `.grad` of some parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._unhooked = list(enumerate(self._parameters))
        self._nothing_pending = [False] * len(self._parameters)
        #: Each gradient at the beginning: None, or the tensor and its version.
        self._marks: list[_Mark | None] = [None] * len(self._parameters)
        #: Parameters with gradient values that are neither copied nor known to be unneeded.
        self._pending = self._nothing_pending
        #: Whether there may be any.
        self.pending = False
        self._copies: dict[int, torch.Tensor] = {}
        self._copied: set[int] = set()
        self._lost = False
        #: Whether this job accumulates gradients over steps.
        self.wanted = False
        #: Copy at the beginning: this job changes gradients outside of backwards.
        self._at_once = False

    def begin(self) -> None:
        """Begin a step."""
        marks: list[_Mark | None] = []
        pending = []
        for parameter in self._parameters:
            grad = parameter.grad
            marks.append(None if grad is None else (id(grad), version_of(grad)))
            pending.append(grad is not None)
        self._marks, self._pending = marks, pending
        self.pending = True in pending
        self._lost = False
        if self._copied:
            self._copied.clear()
        if self.pending:
            if self._unhooked:
                backward.watch(id(self), self._install)
            if self._at_once:
                self._keep_all()

    def before_write(self, parameters: Iterable[torch.Tensor], *, copy: bool) -> None:
        """Prepare for an optimizer that reads the gradients of these parameters.

        Values that no backward of this step has touched come from an earlier step. `copy` means
        that the write can be undone: then they are needed to repeat it.
        """
        if True not in self._pending:
            return
        for parameter in parameters:
            index = self._index.get(id(parameter))
            if index is not None and self._pending[index]:
                self._keep(index, copy=copy)

    def undo(self) -> bool:
        """Put the gradients back; return False if their values are lost."""
        for index, pending in enumerate(self._pending):
            if pending:
                self._keep(index, copy=False)
        for index, parameter in enumerate(self._parameters):
            if self._marks[index] is None:
                parameter.grad = None
            elif index in self._copied:
                _put_back(parameter, self._copies[index])
            elif parameter.grad is None:
                # Its values are not needed, but optimizers skip parameters whose gradient is None.
                parameter.grad = zeros_like(parameter)
        return not self._lost

    def zeroed(self, groups: Sequence[dict[str, Any]]) -> None:
        """Note that an optimizer zeroes its gradients: their old values are not needed."""
        first, mine = groups[0]["params"], self._parameters
        if len(groups) == 1 and len(first) == len(mine) and all(map(is_, first, mine)):
            self.pending, self._pending = False, self._nothing_pending
            backward.before_next.pop(id(self), None)
            return
        for group in groups:
            for parameter in group["params"]:
                index = self._index.get(id(parameter))
                if index is not None:
                    self._pending[index] = False

    def tree(self) -> list[torch.Tensor | bool]:
        """Return, for other ranks, the values where needed, else whether there is a gradient."""
        return [
            grad if self.wanted and grad is not None else grad is not None
            for grad in (parameter.grad for parameter in self._parameters)
        ]

    def load(self, tree: Sequence[torch.Tensor | bool]) -> None:
        for parameter, grad in zip(self._parameters, tree, strict=True):
            if isinstance(grad, torch.Tensor):
                parameter.grad, self.wanted = grad, True
            elif not grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = zeros_like(parameter)

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def _keep_all(self) -> None:
        for index, pending in enumerate(self._pending):
            if pending:
                self._keep(index)

    def _install(self) -> None:
        """Install the copying hooks when a backward begins that may add to old values."""
        if True not in self._pending:
            return
        remaining = []
        for index, parameter in self._unhooked:
            if is_sharded(parameter):
                # Autograd does not add to this gradient, where a hook would see it: FSDP2 does.
                remaining.append((index, parameter))
                if self._pending[index]:
                    self._keep(index)
            elif parameter.requires_grad:
                parameter.register_hook(self._hook(index))  # type: ignore[no-untyped-call]
            else:
                remaining.append((index, parameter))
        self._unhooked = remaining

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def before_accumulation(_: torch.Tensor) -> None:
            if self._pending[index]:
                self._keep(index)

        return before_accumulation

    @torch.no_grad()
    def _keep(self, index: int, *, copy: bool = True) -> None:
        """Copy the values, unless they have been zeroed and so are not needed."""
        grad = self._parameters[index].grad
        untouched = grad is not None and (id(grad), version_of(grad)) == self._marks[index]
        self._pending[index] = untouched and not copy
        if grad is None:
            return
        if untouched:
            if copy:
                self._copy(index, grad)
        elif bool(local_or_whole(grad).any()):
            # Changed outside of hooks, for example by clipping. From now on, copy in time.
            self._lost = self._at_once = True

    def _copy(self, index: int, grad: torch.Tensor) -> None:
        self.wanted = True
        room = self._copies.get(index)
        if room is None or room.shape != grad.shape or room.dtype != grad.dtype:
            self._copies[index] = grad.detach().clone()
        else:
            room.copy_(grad)
        self._copied.add(index)


@torch.no_grad()
def _put_back(parameter: torch.Tensor, copy: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = copy.clone()
    else:
        parameter.grad.copy_(copy)
