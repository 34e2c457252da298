"""The sharded parts of a `TorchState`: averages between replicas, and the joint all-reduce.

Nothing in a sharded step joins all workers: a replica reduces its gradients, and workers with the
same coordinates average theirs. So each step has one all-reduce of 56 bytes over all workers. It
runs before the first write; if writes are copied (and can be undone), or there are none, at the end
of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchelastic import faults
from torchelastic.errors import ConfigError
from torchelastic.snapshot.writer import ShardStatus
from torchelastic.tensors import transfer
from torchelastic.tensors.module_state import parameters_of
from torchelastic.tensors.small_state import Hyperparameters
from torchelastic.training.group.abortable_waits import GenerationOver, PeerLostError
from torchelastic.training.group.gloo import OwnedGloo
from torchelastic.training.group.replica import Replica
from torchelastic.training.sharded.between import Between, Buckets, FullyShardedModels, options
from torchelastic.training.sharded.part_snapshots import PartSnapshots
from torchelastic.training.sharded.shard_tree import check_state
from torchelastic.training.state import TORN, Version, versions_after
from torchelastic.training.undo import OptimizerCopy, Writes

if TYPE_CHECKING:
    from torchelastic.training.session import Session
    from torchelastic.training.step_judge import StepJudge


@dataclass
class Peers:
    """The workers with the same coordinates in all replicas, which hold the same part."""

    rank: int
    size: int
    versions: Sequence[Version]
    received: int
    link: transfer.Messages


class _GroupLink:
    """Messages in a group that torch.distributed does not know."""

    def __init__(self, group: OwnedGloo | None) -> None:
        self._group: Any = group

    def isend(self, tensor: torch.Tensor, dst: int) -> Any:
        return self._group.send([tensor], dst, 0)

    def irecv(self, tensor: torch.Tensor, src: int) -> Any:
        return self._group.recv([tensor], src, 0)


def copies(wanted: bool | None, optimizers: int) -> bool | None:
    """Return whether to copy before writing; None if it is to be found out.

    A step that others have committed is completed from its gradients only if one optimizer writes:
    what a script does between two writes cannot be repeated.
    """
    if optimizers < 2:
        return wanted
    if wanted is False:
        raise ConfigError(
            "A sharded training with several optimizers needs copies to undo a step: leave "
            "copy_before_write=False out."
        )
    return True


class Sharding:
    """The additional work of a step, and of a sync, with sharded models."""

    def __init__(
        self,
        replica: Replica,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        snapshots: PartSnapshots,
        *,
        averages: bool,
    ) -> None:
        """`averages`: whether gradients are averaged between replicas in each backward. A fixed
        batch adds them itself (`training.fixed_sums`)."""
        self.replica, self.snapshots = replica, snapshots
        self._optimizers = optimizers
        self._between = Between()
        self._fsdp = FullyShardedModels(models)
        rest: list[nn.Parameter] = []
        if averages:
            self._fsdp.hook(self._between.average)
            managed, every = self._fsdp.parameters, (one.parameters() for one in models)
            rest = [one for some in every for one in some if id(one) not in managed]
        self._buckets = Buckets(rest, self._between.average, self.reduces)
        self._joint: OwnedGloo | None = None
        self._writes: Writes | None = None
        #: Judges the steps, if there is a guard.
        self.judge: StepJudge | None = None
        #: Whether this step has had its joint all-reduce, and whether a world's first write was
        #: looked at: it makes optimizer state.
        self._has_joined = self._is_checked = False
        #: The way to complete the step that was interrupted in its last all-reduce.
        self.completion: Completion | None = None
        self._generation = -1

    def reduces(self) -> bool:
        """Return whether the next backward reduces gradients in this replica."""
        return self._fsdp.reduces

    @property
    def ready_in(self) -> int:
        """The generation whose step this worker can complete, or -1."""
        return -1 if self.completion is None else self._generation

    def complete(
        self,
        world: Session,
        rest: Callable[[], Any],
        load: Callable[[Any], None],
        was_skipped: Callable[[Any, int], bool],
    ) -> bool:
        """Collective: complete the step that was interrupted here if others have committed it.

        `rest` returns the state that is not sharded; `was_skipped` whether a step was skipped,
        according to that of others. Return whether this worker completed a step.
        """
        completion, self.completion = self.completion, None
        base = world.freshest
        after = versions_after(world.versions, world.ready)
        late = [rank for rank, one in enumerate(world.versions) if after[rank] == base != one]
        if base == TORN or not late:
            return False
        self.completion = completion  # until the others' part is here
        first = world.versions.index(base)
        groups = [Hyperparameters(optimizer) for optimizer in self._optimizers]
        # What a scheduler did after the write is in the groups, not in its own state.
        tree = [rest(), [one.tree() for one in groups]] if world.rank == first else None
        link = _GroupLink(world.group.joint)
        received = transfer.share(world, tree, holders=[first], lacking=late, link=link)
        self.completion = None
        world.versions = tuple(
            base if rank in late else one for rank, one in enumerate(world.versions)
        )
        if world.rank not in late:
            return False
        assert completion is not None
        if not was_skipped(received[0], base[1]):
            with self._unwatched():
                completion.complete()
        for group, values in zip(groups, received[1], strict=True):
            group.load(values)
        load(received[0])
        world.version = base
        return True

    def peers(self, world: Session) -> Peers:
        """Return the workers with this one's coordinates, by replica."""
        number, coordinate = divmod(world.rank, self.replica.size)
        return Peers(
            rank=number,
            size=world.size // self.replica.size,
            versions=world.versions[coordinate :: self.replica.size],
            received=world.received,
            link=_GroupLink(world.group.between),
        )

    def enter(self, world: Session, writes: Writes) -> None:
        """Use the groups of this world."""
        check_state(self._optimizers)
        self._is_checked = False
        self._between.group = world.group.between
        self._joint = world.group.joint
        self.completion, self._has_joined = None, False
        self._writes, self._generation = writes, world.generation
        writes.before_first = self._before_first_write
        self.snapshots.begin(world, self.replica.size)
        world.before_commit = self._before_commit

    def begin(self) -> None:
        """Begin a step."""
        self._buckets.begin()

    def _before_commit(self) -> None:
        """End a step: join all workers if they have not joined yet, because its writes are copied,
        and can still be undone, or because there were none."""
        if not self.reduces():
            raise ConfigError(
                "The step ended with set_requires_gradient_sync(False): its gradients are on this "
                "worker only. Take all microbatches of an optimizer step in one train_step, and "
                "turn it on for the last."
            )
        if not self._is_checked and self._writes is not None and self._writes.begun:
            check_state(self._optimizers)  # not first after a failure, when it has to be sent
            self._is_checked = True
        if not self._has_joined:
            self._join_all(None)
        self._has_joined = False

    def interrupted(self) -> None:
        """Bring FSDP2 to the beginning of the step that was aborted."""
        self._has_joined = False
        self._fsdp.reset()
        self._buckets.forget()

    def _before_first_write(self, optimizer: Optimizer) -> None:
        is_copied = self._writes is not None and self._writes.copying
        # The write of a bad step has not begun, and so may be the first once more.
        if not is_copied and not self._has_joined:
            self._join_all(optimizer)
        self.snapshots.before_write()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Let an optimizer write without the joint all-reduce and the guard's verdict, which the
        others have given already; forget the write afterwards."""
        writes = self._writes
        if writes is None:
            yield
            return
        writes.before_first = None
        judge, writes.judge = writes.judge, None
        try:
            yield
        finally:
            writes.judge = judge
        writes.begin()

    def _way_to_complete(self, optimizer: Optimizer | None, writes: Writes) -> Completion:
        if optimizer is not None:
            return FromGradients(optimizer)
        return FromCopies(self._optimizers) if writes.begun else Unwritten(self._optimizers)

    def _join_all(self, optimizer: Optimizer | None) -> None:
        """Wait until all workers are here: each has all the gradients of its part. The values that
        are added up are their votes on a snapshot, and their numbers for the guard."""
        self._between.release()
        assert self._joint is not None
        assert self._writes is not None
        if faults.planned:
            faults.at("joint.before")
        vote, judge = self.snapshots.vote(), self.judge
        votes = [float(one == vote) for one in ShardStatus]
        own = (0.0, 0.0, 0.0) if judge is None else judge.own()
        told = torch.tensor([*votes, *own], dtype=torch.float64)
        self._writes.joining = True
        try:
            self._joint.allreduce([told], options(dist.ReduceOp.SUM, on_host=True))
        except (GenerationOver, PeerLostError):
            self.completion = self._way_to_complete(optimizer, self._writes)
            raise
        finally:
            self._writes.joining = False
        self._has_joined = True
        *voted, square, loss, losses = told.tolist()
        if vote is not None:
            self.snapshots.decide(lowest(voted))
        if judge is not None:
            judge.joined(square, loss, losses, self._joint.size() // self.replica.size)
        if faults.planned:
            faults.at("joint.after")


def lowest(votes: Sequence[float]) -> ShardStatus:
    """Return the lowest status that anyone has voted for, by their numbers of votes."""
    return next(one for one, count in zip(ShardStatus, votes, strict=True) if count)


# --- a step that others have committed ------------------------------------------------------------


class Completion(Protocol):
    """A way to complete a step that was rolled back here and that others may have committed.

    A worker whose last all-reduce of a step was aborted does not know whether others have committed
    the step. It rolls back, and keeps what it needs to complete the step, until the next world
    knows.
    """

    def complete(self) -> None:
        """Bring parameters and optimizer state to the end of the step."""


#: The attributes through which a GradScaler tells a fused optimizer to unscale the gradients.
_SCALING = ("grad_scale", "found_inf")


def _taken_gradients(
    optimizers: Iterable[Optimizer],
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Take the gradients away, so that the rollback does not write to them."""
    found = [(one, one.grad) for optimizer in optimizers for one in parameters_of(optimizer)]
    for parameter, _ in found:
        parameter.grad = None
    return found


class FromGradients:
    """The reduced gradients, and the hyperparameters, that one optimizer was about to use."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        scaling = {name: getattr(optimizer, name, None) for name in _SCALING}
        self._scaling = {name: one.clone() for name, one in scaling.items() if one is not None}
        hyperparameters = Hyperparameters(optimizer)
        self._hyperparameters = hyperparameters.save()
        self._gradients = _taken_gradients([optimizer])

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
        self._gradients = _taken_gradients(optimizers)

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
