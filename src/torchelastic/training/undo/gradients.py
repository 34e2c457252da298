"""Gradients as they were at the beginning of a step, without copying them in the usual patterns.

Zeroed at the end of a step, gradients are None at the beginning, and None is all there is to put
back. Zeroed at the start, they hold values that nobody will read: nothing to put back either. Only
when a backward adds to what an earlier step has left do the values matter. A hook on each parameter
runs just before that, and copies then. The hooks are installed once a backward begins while there
are such values: a job that zeroes all at the start or the end never pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch

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
        #: What each was at the beginning: None, or which tensor in which version.
        self._marks: list[_Mark | None] = [None] * len(self._parameters)
        #: Which have a gradient whose values are neither copied nor known to be unwanted.
        self._pending = self._nothing_pending
        #: Whether there may be such.
        self.pending = False
        self._copies: dict[int, torch.Tensor] = {}
        self._copied: set[int] = set()
        self._lost = False
        #: In this job values that a step has left are added to in the next.
        self.wanted = False
        #: Copy at the beginning: here gradients are changed by other means than a backward.
        self._at_once = False

    def begin(self) -> None:
        """A step begins."""
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
        """An optimizer is about to read those of these parameters, and may not be the last.

        Values that no backward of this step has touched come from an earlier one. `copy` says
        that the write itself can be undone: then they are wanted for doing it again.
        """
        if True not in self._pending:
            return
        for parameter in parameters:
            index = self._index.get(id(parameter))
            if index is not None and self._pending[index]:
                self._keep(index, copy=copy)

    def undo(self) -> bool:
        """Put the gradients back; False if their values have been lost."""
        for index, pending in enumerate(self._pending):
            if pending:
                self._keep(index, copy=False)
        for index, parameter in enumerate(self._parameters):
            if self._marks[index] is None:
                parameter.grad = None
            elif index in self._copied:
                _put_back(parameter, self._copies[index])
            elif parameter.grad is None:
                # Its values are not wanted, but whether it is None decides what optimizers skip.
                parameter.grad = torch.zeros_like(parameter)
        return not self._lost

    def zeroed(self, groups: Sequence[dict[str, Any]]) -> None:
        """An optimizer zeroes the gradients of its groups: nobody wants what they were."""
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
        """For those who lack them: the values where they are wanted, else whether there are any."""
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
                parameter.grad = torch.zeros_like(parameter)

    def _keep_all(self) -> None:
        for index, pending in enumerate(self._pending):
            if pending:
                self._keep(index)

    def _install(self) -> None:
        """A backward begins; if it may add to what is there, see to it that it is copied."""
        if True not in self._pending:
            return
        remaining = []
        for index, parameter in self._unhooked:
            if parameter.requires_grad:
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
        """Copy the values, unless they have been zeroed: then nobody will ask for them."""
        grad = self._parameters[index].grad
        untouched = grad is not None and (id(grad), version_of(grad)) == self._marks[index]
        self._pending[index] = untouched and not copy
        if grad is None:
            return
        if untouched:
            if copy:
                self._copy(index, grad)
        elif bool(grad.any()):
            # Changed where no hook looks, by clipping for one. From now on copied in time.
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
