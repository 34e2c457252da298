"""Writes to parameters and optimizer state: noticed by hooks, copied beforehand only if needed.

Only `optimizer.step` writes them. A step that fails before it leaves them unchanged, so there is
nothing to undo. A step that fails inside or after it cannot be undone, and need not be, as long as
no collective follows the write: no other rank can interrupt this one then, and ranks that finished
the step hold its result.

A collective after or in a write (a loss reduced after the step, a second optimizer, a sharded one)
breaks that rule: all ranks may fail between the two. We notice it when it is launched, and from
then on copy parameters and state before each write. In the first step with a write this is not
known yet, so we copy there too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchelastic import faults, torch_private
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.tensors.small_state import copied, put_back
from torchelastic.training.undo.gradients import Gradients

log = logging.getLogger(__name__)


class Writes:
    """The optimizers' writes since the step began."""

    def __init__(
        self, optimizers: Sequence[Optimizer], gradients: Gradients, *, copy: bool | None = None
    ) -> None:
        """`copy`: whether to copy before writing; None finds out."""
        self._gradients = gradients
        self._copies = {id(optimizer): OptimizerCopy(optimizer) for optimizer in optimizers}
        self._fixed = copy is not None
        self.copying = copy is not False
        #: Whether the first step with a write is still to come.
        self.learning = copy is None
        #: Optimizers that have begun to write in this step, and those still writing.
        self.begun: set[int] = set()
        self._open: set[int] = set()
        #: Raises unless the collectives behind the next write have succeeded.
        self.check_collectives: Callable[[], None] | None = None
        #: Whether the next collective is ours: its failure is not undone, but completed.
        self.joining = False
        #: Called before the first write of a step.
        self.before_first: Callable[[Optimizer], None] | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
            _notice_zeroing(optimizer, gradients)

    def begin(self) -> None:
        """Begin a step."""
        if self.begun:
            self.begun.clear()
            self._open.clear()
            if self.copying:
                for copy in self._copies.values():
                    copy.taken = False

    def committed(self) -> None:
        """Note that the step is done."""
        if self.learning and self.begun:
            self.learned(copying=False)

    def learned(self, *, copying: bool) -> None:
        """Note whether this job must copy, learned from its own step or from a peer."""
        if self._fixed:
            return
        self.learning = False
        self.copying = copying
        if not copying:
            for copy in self._copies.values():
                copy.drop()

    @property
    def known(self) -> bool | None:
        """Whether this job copies before it writes; None while not known."""
        return None if self.learning else self.copying

    def collective(self) -> None:
        """Note that a collective is about to be launched in a step."""
        if not self.begun or (self.copying and not self.learning) or self._fixed or self.joining:
            return
        self.learned(copying=True)
        log.warning(
            "A collective runs %s optimizer.step: from now on parameters and optimizer state are "
            "copied before each write, so that a failure of the collective can be undone. To avoid "
            "the copy, run the collective before optimizer.step.",
            "in" if self._open else "after",
        )

    def undo(self) -> str | None:
        """Undo the writes; return None, or the reason why that is impossible."""
        if any(not self._copies[key].taken for key in self.begun):
            where = "inside" if self._open else "after"
            return f"The step failed {where} optimizer.step, and there is no copy from before it."
        for key in self.begun:
            self._copies[key].undo()
        self.begin()
        return None

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if faults.planned:
            faults.at("optimizer.before")
        if self.check_collectives is not None:
            self.check_collectives()
        if self.before_first is not None and not self.begun:
            self.before_first(optimizer)
        key = id(optimizer)
        if self._gradients.pending:
            self._gradients.before_write(_parameters(optimizer), copy=self.copying)
        # A second write of the same step must not replace the copy made before the first.
        if self.copying and key not in self.begun:
            self._copies[key].take()
        self.begun.add(key)
        self._open.add(key)
        if faults.planned:
            faults.at("optimizer.inside")

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._open.discard(id(optimizer))
        if faults.planned:
            faults.at("optimizer.after")


def _notice_zeroing(optimizer: Optimizer, gradients: Gradients) -> None:
    """Note when an optimizer zeroes gradients, which are then not needed.

    The wrapper stays with this object: optimizers leave it out when they are copied or pickled.
    """
    zero_grad: Callable[..., None] = optimizer.zero_grad

    def noticed(set_to_none: bool = True) -> None:
        if gradients.pending:
            gradients.zeroed(optimizer.param_groups)
        zero_grad(set_to_none=set_to_none)

    optimizer.zero_grad = noticed  # type: ignore[method-assign]


class OptimizerCopy:
    """Parameters and state of one optimizer before its write, in reused memory."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.drop()

    def drop(self) -> None:
        """Free the memory."""
        self.taken = False
        self._parameters: list[torch.Tensor] = []
        self._parameter_copies: list[torch.Tensor] = []
        self._state_copies: list[torch.Tensor] = []
        self._state: dict[Any, dict[str, Any]] = {}

    @torch.no_grad()
    def take(self) -> None:
        state = self._optimizer.state
        self._parameters = _parameters(self._optimizer)
        self._parameter_copies = _copy_all(self._parameters, self._parameter_copies)
        tensors = [
            value
            for entries in state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        self._state_copies = _copy_all(tensors, self._state_copies)
        saved = iter(self._state_copies)
        self._state = {
            key: {
                name: next(saved) if isinstance(value, torch.Tensor) else copied(value)
                for name, value in entries.items()
            }
            for key, entries in state.items()
        }
        self.taken = True

    @torch.no_grad()
    def undo(self) -> None:
        if self._parameters:
            _copy(self._parameters, self._parameter_copies)
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, entries in self._state.items():
            put_back(state[key], entries)


def _copy_all(live: Sequence[torch.Tensor], rooms: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of all tensors, in the old copies' memory where they fit."""
    reused = len(rooms) == len(live) and all(
        room.shape == one.shape and room.dtype == one.dtype
        for room, one in zip(rooms, live, strict=True)
    )
    if not reused:
        rooms = [torch.empty_like(one) for one in live]
    if rooms:
        _copy(rooms, live)
    return rooms


def _copy(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    torch_private.copy_all(
        [local_or_whole(one) for one in to], [local_or_whole(one) for one in values]
    )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
