"""`State`: the training state that survives a failure; the user's class defines it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchelastic.training.sharded.part_snapshots import PartSnapshots
    from torchelastic.training.state_checks import StateChecks
    from torchelastic.training.step_guard import Action

#: (generation, step): the world, and the number of steps committed. The freshest is the largest.
Version = tuple[int, int]

#: The version that every worker can build alone; from a checkpoint of step s it is (-1, s).
FIRST: Version = (-1, 0)
#: Half-written and impossible to roll back: every other version is fresher.
TORN: Version = (-2, -1)


class Torn(RuntimeError):
    """Raised by `State.apply`: the state is half-written and cannot be rolled back.

    The worker lives on and receives a peer's state in the next world.
    """


class State(ABC):
    """Everything that training needs to continue, and how workers agree on it.

    Every worker builds the same first state from the same arguments. Implement `sync`; without
    `snapshot` and `apply`, a step that fails half-way is not rolled back.
    """

    #: Call `snapshot` before every step, whatever `train(snapshot_every=)` is: True where only
    #: the current step can be undone.
    _every_step = False

    @abstractmethod
    def sync(self) -> None:
        """Bring all workers to one state. Called once in every world, on all its workers, after
        its process group is up and before its first step.

        `torchelastic.training.session.current().versions` shows which rank has the freshest state.
        """

    def snapshot(self) -> Any:
        """Return what `apply` needs to bring this object back to its current state.

        Called before a step, and before `sync`. Return None if rollback is not supported.
        """
        return None

    def apply(self, snapshot: Any) -> None:  # noqa: B027, the default is to do nothing
        """Roll back to the result of `snapshot`; `sync` follows. Raise `Torn` if impossible."""

    def save(self, stream: IO[bytes]) -> None:
        """Write a checkpoint: `torch.save` of what `snapshot` returns."""
        import torch

        torch.save(self.snapshot(), stream)

    def load(self, stream: IO[bytes]) -> None:
        """Read what `save` has written: any Python object, by `torch.load`.

        That is pickle, which can run code from the file: load only checkpoints from a place that
        only you can write to. Override both methods to be stricter. None of this crosses the
        network.
        """
        import torch

        self.apply(torch.load(stream, weights_only=False))

    def should_save_checkpoint(self, rank: int) -> bool:
        """Return True for a checkpoint. Called after every step on every rank; rank 0 writes."""
        return False

    def _begins_at(self) -> Version:
        """Return the state's version when the training begins."""
        return FIRST

    def _form(self) -> Sequence[tuple[str, str]]:
        """Return what must be the same on all workers, as (thing, description) pairs."""
        return ()

    def _rehearse(self) -> None:  # noqa: B027, most states need not
        """Do in advance what would make the first step longer, while there is no world."""

    def _ready_in(self) -> int:
        """Return the generation of a step that was interrupted and can be completed, or -1."""
        return -1

    def _copies(self) -> bool | None:
        """Return whether steps copy before they write; None if that is not known."""
        return None

    def _complete(self) -> bool:
        """Collective: complete the interrupted step if others have committed it. Return whether
        this worker did."""
        return False

    def _judged(self) -> tuple[Action, str] | None:
        """Judge the step before it is committed. If it is bad, undo it, and return what to do about
        it, and why it is bad."""
        return None

    def _committed(self, version: Version) -> None:  # noqa: B027, most states need not know
        """Note that the step is done and the state has this version."""

    def _ended(self) -> None:  # noqa: B027, most states need not know
        """Note that the training is done; called on rank 0."""

    def _part_snapshots(self) -> PartSnapshots | None:
        """Return the snapshots of this worker's part of a sharded state, if it has any."""
        return None

    def _checks(self) -> StateChecks | None:
        """Return the comparison of this worker's state with the others', if there is one."""
        return None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Accept release 0.1's names of two methods."""
        super().__init_subclass__(**arguments)
        for today, old in (("snapshot", "capture_snapshot"), ("apply", "apply_snapshot")):
            if old in vars(cls) and today not in vars(cls):
                setattr(cls, today, _forward(old))


def _forward(name: str) -> Callable[..., Any]:
    """Make a method that calls the one with this name, including later overrides."""

    def method(self: State, *args: Any) -> Any:
        return getattr(self, name)(*args)

    return method


def call_sync(state: State, *, rank: int, size: int) -> None:
    """Call `sync()`, or 0.1's `sync(world_size, rank)`."""
    if _wants_world(state):
        state.sync(size, rank)  # type: ignore[call-arg]
    else:
        state.sync()


def _wants_world(state: State) -> bool:
    needed = [
        parameter
        for parameter in inspect.signature(state.sync).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 2


# --- the version that a world goes on from, and who has it: pure ---------------------------------

# The state of a worker is one of several parts if it is sharded, its rank modulo the size of a
# replica; otherwise there is one part. A step of a sharded state ends with one all-reduce of all
# workers, before anything is written. It can succeed on some workers and be aborted on others.
# Workers on which it succeeded commit the step. The others have all their gradients, since every
# worker had entered it: such a worker is *ready*, and can complete the step alone. So if any worker
# has committed a step, every other living worker has it or can complete it: a part is lost only if
# all workers that have it are.
#
# A sharded state that was received keeps its version until the next step. Otherwise, if workers of
# another part were interrupted while they received theirs, no version would have all its parts.


def base_of(versions: Sequence[Version], ready: Sequence[int], parts: int) -> Version:
    """Return the freshest version of which some worker has each part; TORN if there is none.

    By rank: the versions of the workers, and the generation whose step each is ready to complete,
    or -1.
    """
    after = versions_after(versions, ready)
    for version in sorted(set(versions), reverse=True):
        found = {
            rank % parts
            for rank in range(len(versions))
            if version in (versions[rank], after[rank])
        }
        if len(found) == parts and version != TORN:
            return version
    return TORN


def versions_after(versions: Sequence[Version], ready: Sequence[int]) -> list[Version]:
    """Return, by rank, the version that each worker has or can complete."""
    return [
        (generation, version[1] + 1) if generation >= 0 else version
        for version, generation in zip(versions, ready, strict=True)
    ]


def missing_parts(versions: Sequence[Version], version: Version, parts: int) -> list[int]:
    """Return the parts of a version that no worker has."""
    found = {rank % parts for rank, one in enumerate(versions) if one == version}
    return [part for part in range(parts) if part not in found]


def holders_of(versions: Sequence[Version], base: Version) -> tuple[int, ...]:
    """Return the ranks with this version, whose state all others receive.

    Before any step is committed, each rank has built its state alone, and these may differ: then
    the first such rank's is taken.
    """
    ranks = tuple(rank for rank, version in enumerate(versions) if version == base)
    return ranks[:1] if base[0] < 0 else ranks


def is_worthless(own: Version, base: Version, *, is_whole: bool = True) -> bool:
    """Return whether a state may be overwritten before its replacement has fully arrived.

    The state of a worker that rolled back is the second best, should the best be lost during the
    transfer. Not so if parts of it are missing: nothing can continue from it, and keeping it until
    then takes the memory of a whole shard. A first state is kept while no rank has a better one.
    """
    return own < base and base[0] >= 0 and (own[0] < 0 or not is_whole)
