"""Undo a step: restore everything to the step's beginning, so that it can be repeated.

At the beginning of a step only small state is saved. Hooks save gradients and what optimizers
write, if and when these are about to change in a way that would have to be undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import faults, torch_private
from torchelastic.tensors import rank_private
from torchelastic.tensors.buffers import Buffers
from torchelastic.tensors.dtensors import is_sharded, local_or_whole, zeros_like
from torchelastic.tensors.module_state import parameters_of
from torchelastic.tensors.rank_private import Private, Publisher
from torchelastic.tensors.small_state import Saver, copied, put_back
from torchelastic.torch_private import version_of
from torchelastic.training.group import backward
from torchelastic.training.state import Torn, Version

if TYPE_CHECKING:
    from torchelastic.training.step_judge import StepJudge

log = logging.getLogger(__name__)


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
        position: Sequence[Saver] = (),
        *,
        copy: bool | None = None,
    ) -> None:
        """`position` saves where training is in its data."""
        self.buffers = Buffers(modules)
        #: Returns the private state of this rank.
        self.private = rank_private.PrivateStateReader(self.buffers).read
        self.gradients = Gradients(_all_parameters(modules, optimizers))
        self.writes = Writes(optimizers, self.gradients, copy=copy)
        self._savers = [*savers, *position]
        self._saves = [saver.save for saver in self._savers]
        #: The number of savers without those of the position.
        self._placeless = len(savers)
        self._publisher: Publisher | None = None
        self._latest: UndoRecord | None = None
        #: The heavy buffers that were saved at its beginning.
        self._heavy = self.buffers.heavy
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
        self._heavy = self.buffers.heavy
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
        self._undo(snapshot, len(self._savers))

    def undo_bad(self, *, moves_on: bool) -> None:
        """Undo the latest step, which is bad, in its world; with `moves_on` all but the position in
        the data. Raise Torn if that is impossible."""
        assert self._latest is not None
        self.outside()
        self._undo(self._latest, self._placeless if moves_on else len(self._savers))

    def at_beginning(self) -> Private:
        """Return the private state that the latest step began with, and put heavy buffers back."""
        assert self._latest is not None
        for one in self._heavy:  # a state that was loaded since has others in `buffers`
            one.restore()
        return self._latest.private

    def _undo(self, snapshot: UndoRecord, savers: int) -> None:
        for saver, saved in zip(self._savers[:savers], snapshot.small, strict=False):
            saver.restore(saved)
        rank_private.restore(snapshot.private, self.buffers)
        self.buffers.restore_heavy()
        why = self.writes.undo()
        if self._overwritten:
            why = "Another state was loaded since the undo record was made."
        if not self.gradients.undo():
            why = why or "Gradients were changed in place; their old values are lost."
        if why is not None:
            raise Torn(why)


def _all_parameters(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[torch.Tensor]:
    """Return the parameters of both, each once, in the same order on every rank."""
    found: list[torch.Tensor] = [one for module in modules for one in module.parameters()]
    for optimizer in optimizers:
        found += parameters_of(optimizer)
    return list(dict.fromkeys(found))


# --- gradients as they were at the beginning of a step --------------------------------------------


_Mark = tuple[int, int]


class Gradients:
    """The `.grad` of some parameters at the beginning of a step, in most jobs without a copy.

    If a job zeroes gradients at the end of a step, they are None at the beginning, and None is all
    there is to put back. If it zeroes them at the start, they hold values that nothing will read:
    there is nothing to put back. The values matter only when a backward adds to what an earlier
    step left. A hook on each parameter runs just before that, and makes the copy. The hooks are
    installed when a backward begins while there are such values: a job that zeroes all gradients at
    the start or the end never pays for them.
    """

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
                for index, old in enumerate(self._pending):
                    if old:
                        self._keep(index)

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
            elif not self._pending[index]:
                parameter.grad.detach().zero_()  # they may not be finite
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

    def of_this_step(self) -> list[torch.Tensor]:
        """Return the gradients that this step has computed; a new worker has no older ones."""
        return [
            one.grad
            for one, is_old in zip(self._parameters, self._pending, strict=True)
            if one.grad is not None and not is_old
        ]

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


# --- writes to parameters and optimizer state -----------------------------------------------------


class Writes:
    """The optimizers' writes since the step began: noticed by hooks, copied before if needed.

    Only `optimizer.step` writes them. A step that fails before it leaves them unchanged, so there
    is nothing to undo. A step that fails inside or after it cannot be undone, and need not be, as
    long as no collective follows the write: no other rank can interrupt this one then, and ranks
    that finished the step hold its result.

    A collective after or in a write (a loss reduced after the step, a second optimizer, a sharded
    one) breaks that rule: all ranks may fail between the two. We notice it when it is launched, and
    from then on copy parameters and state before each write. In the first step with a write this is
    not known yet, so we copy there too.
    """

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
        #: Keeps the optimizers of a bad step from writing.
        self.judge: StepJudge | None = None
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

    def collective(self, what: str = "collective") -> None:
        """Note that a collective is about to be launched in a step, or that a backward has begun:
        a guard may find its gradients bad."""
        if not self.begun or (self.copying and not self.learning) or self._fixed or self.joining:
            return
        self.learned(copying=True)
        log.warning(
            "A %s runs %s optimizer.step: from now on parameters and optimizer state are copied "
            "before each write, so that it can be undone if the %s goes wrong. To avoid the copy, "
            "run the %s before optimizer.step.",
            what,
            "in" if self._open else "after",
            what,
            what,
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
        if self.judge is not None:
            if self.judge.before_write(optimizer):
                return
            if self.check_collectives is not None:
                self.check_collectives()  # that of the judge
        key = id(optimizer)
        if self._gradients.pending:
            self._gradients.before_write(parameters_of(optimizer), copy=self.copying)
        # A second write of the same step must not replace the copy made before the first.
        if self.copying and key not in self.begun:
            self._copies[key].take()
        self.begun.add(key)
        self._open.add(key)
        if faults.planned:
            faults.at("optimizer.inside")

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._open.discard(id(optimizer))
        if self.judge is not None:
            self.judge.after_step()
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
        self._parameters = parameters_of(self._optimizer)
        self._parameter_copies = copy_all(self._parameters, self._parameter_copies)
        tensors = [
            value
            for entries in state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        self._state_copies = copy_all(tensors, self._state_copies)
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


def copy_all(live: Sequence[torch.Tensor], rooms: list[torch.Tensor]) -> list[torch.Tensor]:
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
