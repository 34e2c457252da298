"""Undo a step: restore everything to the step's beginning, so that it can be repeated.

At the beginning of a step only small state is saved. Hooks save gradients and what optimizers
write, if and when these are about to change in a way that would have to be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic.tensors import rank_private
from torchelastic.tensors.buffers import Buffers
from torchelastic.tensors.rank_private import Private, Publisher
from torchelastic.tensors.small_state import Saver
from torchelastic.training.state.state import Torn, Version
from torchelastic.training.undo.gradients import Gradients
from torchelastic.training.undo.writes import Writes


class UndoRecord(NamedTuple):
    """The small state at the beginning of a step. Only the latest record can be applied."""

    version: Version
    private: Private
    small: list[Any]


class Undo:
    """Undoes the current step of these modules and optimizers."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        savers: Sequence[Saver],
        *,
        copy: bool | None = None,
    ) -> None:
        self.buffers = Buffers(modules)
        #: Returns the private state of this rank.
        self.private = rank_private.PrivateStateReader(self.buffers).read
        self.gradients = Gradients(_parameters(modules, optimizers))
        self.writes = Writes(optimizers, self.gradients, copy=copy)
        self._savers = list(savers)
        self._saves = [saver.save for saver in savers]
        self._publisher: Publisher | None = None
        self._latest: UndoRecord | None = None
        #: The version at the end of this step; None outside of a step.
        self._next: Version | None = None
        #: The generation of these steps; None from an undone step to the next world.
        self._generation: int | None = None
        self._overwritten = False
        #: Whether every step has one collective of all workers, the joint one: no worker commits a
        #: step before all have launched it. Otherwise any may be the last.
        self.is_joint = False
        #: This rank's private state when its step failed, as of the end of that step, and the heavy
        #: buffers that the step had changed.
        self.late: tuple[Version, Private, list[torch.Tensor | None]] | None = None

    def enter(self, generation: int, publisher: Publisher | None) -> None:
        """Enter a generation: the following steps belong to it."""
        self._generation = generation
        self._publisher = publisher
        self.late = None
        self.buffers.find()

    def overwritten(self) -> None:
        """Note that another state was loaded: the latest undo record is useless."""
        self._overwritten = True

    def outside(self) -> None:
        """Note that the following collectives belong to no step."""
        self._next = None

    def begin(self, version: Version) -> UndoRecord:
        """Begin a step; return its undo record."""
        now = self.private()
        if self.buffers.heavy:
            self.buffers.save_heavy()
        self.gradients.begin()
        self.writes.begin()
        self._overwritten = False
        small = []
        for save in self._saves:
            small.append(save())
        # Faster than UndoRecord(...), which would call Python code; the same below.
        self._latest = tuple.__new__(UndoRecord, (version, now, small))
        if self._generation is not None:
            self._next = (self._generation, version[1] + 1)
            if self._publisher is not None:
                self._publisher.begin(version, now)
        return self._latest

    def committed(self) -> None:
        """Note that the step is done."""
        self._next = None
        if self.writes.learning:
            self.writes.committed()

    def before_collective(self) -> None:
        """Run in the launching thread, which may be one of autograd's."""
        ending = self._next
        if ending is None:
            return
        if self.writes.begun:
            self.writes.collective()
        if self._publisher is not None and (self.writes.joining or not self.is_joint):
            self._publisher.in_flight(ending, self.private())

    def undo(self, snapshot: UndoRecord) -> None:
        """Undo the step. If only the small state can be restored, do that and raise Torn."""
        if snapshot is not self._latest:
            raise ValueError("Only the latest undo record of a TorchState can be applied.")
        if self._next is not None:
            # Peers may have finished this step, and then so must we.
            self.late = self._next, self.private(), self.buffers.heavy_changes()
        self.outside()
        self._generation = None
        self._restore_small(snapshot)
        why = self.writes.undo()
        if self._overwritten:
            why = "Another state was loaded since the undo record was made."
        if not self.gradients.undo():
            why = why or "Gradients were changed in place; their old values are lost."
        if why is not None:
            raise Torn(why)

    def _restore_small(self, snapshot: UndoRecord) -> None:
        for saver, saved in zip(self._savers, snapshot.small, strict=True):
            saver.restore(saved)
        rank_private.restore(snapshot.private, self.buffers)
        self.buffers.restore_heavy()


def _parameters(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[torch.Tensor]:
    """Return the parameters of both, each once, in the same order on every rank."""
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(dict.fromkeys(group["params"]))
    return list(found)
