"""`State`: what survives a failure. The user's class says what it consists of."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import IO, Any

#: (generation, step): in which world so many steps were committed. The freshest is the largest.
Version = tuple[int, int]

#: What every worker can build alone; loaded from a checkpoint of step s it is (-1, s).
FIRST: Version = (-1, 0)
#: Half-written, and it cannot be rolled back: anything is fresher.
TORN: Version = (-2, -1)


class Torn(RuntimeError):
    """Raised by `State.apply`: the state is half-written and cannot be rolled back.

    The worker lives on and is given a state by a peer in the next world.
    """


class State(ABC):
    """All that a training needs to go on, and how workers come to agree on it.

    Every worker builds the same first state from the same arguments, alone. `sync` is yours to
    write; without `snapshot` and `apply` a step that fails half-way is not rolled back.
    """

    #: Whether `snapshot` is taken before every step, whatever `train(snapshot_every=)` says:
    #: True where only a step that has just begun can be undone.
    _every_step = False

    @abstractmethod
    def sync(self) -> None:
        """Bring all workers to one state. Called once in every world, by all its workers, when
        its process group is up and before its first step.

        `torchelastic.training.session.current().versions` says who has the freshest state.
        """

    def snapshot(self) -> Any:
        """What `apply` needs to bring this very object back to where it is now.

        Taken before a step, and before `sync`. None: rolling back is not supported.
        """
        return None

    def apply(self, snapshot: Any) -> None:  # noqa: B027, the default is to do nothing
        """Go back to a snapshot. `sync` follows. Raise `Torn` where that is impossible."""

    def save(self, stream: IO[bytes]) -> None:
        """Write a checkpoint: the snapshot, by `torch.save`."""
        import torch

        torch.save(self.snapshot(), stream)

    def load(self, stream: IO[bytes]) -> None:
        """Read what `save` has written: any Python object, by `torch.load`.

        That is pickle, which runs what a file tells it to: a checkpoint must come from a place
        that only you write to. Override both to be stricter. Nothing of this crosses the network.
        """
        import torch

        self.apply(torch.load(stream, weights_only=False))

    def should_save_checkpoint(self, rank: int) -> bool:
        """Asked after every step, on every rank: is it time for a checkpoint? Rank 0 writes it."""
        return False

    def _begins_at(self) -> Version:
        """The version it has when the training begins."""
        return FIRST

    def _form(self) -> Sequence[tuple[str, str]]:
        """What must be the same in all workers: a thing and how it is, in words, one by one."""
        return ()

    def _committed(self, version: Version) -> None:  # noqa: B027, most states need not know
        """The step is done, and the state has this version."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Release 0.1's names of two methods are taken for today's."""
        super().__init_subclass__(**arguments)
        for today, old in (("snapshot", "capture_snapshot"), ("apply", "apply_snapshot")):
            if old in vars(cls) and today not in vars(cls):
                setattr(cls, today, _forward(old))


def _forward(name: str) -> Callable[..., Any]:
    """A method that calls the one with this name, as subclasses of the subclass have it."""

    def method(self: State, *args: Any) -> Any:
        return getattr(self, name)(*args)

    return method


def call_sync(state: State, *, rank: int, size: int) -> None:
    """`sync()`, or 0.1's `sync(world_size, rank)`."""
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
