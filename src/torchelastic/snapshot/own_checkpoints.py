"""A script that has checkpoints of its own, and what `restore` does beside them.

The script loads its file, which has done N steps, and calls `restore(start=N)`. S is the newest
step that torchelastic has, in memory or in storage:

    restore(start=N)   S >= N           load S: a worker that was restarted has loaded an older file
                       S < N, or no S   keep what the script has loaded, and count from N
    restore(start=0)   S                load S
                       no S             count from 0, whatever the script has loaded
    restore()          S                load S; a warning if it is from storage, and the script had
                                        loaded something that may be newer
                       no S             count from 0; an error if the script has loaded something
    ranks disagree     S >= all          load S
    about N            else             the ranks with the largest N send their state to the others;
                                        an error where each rank has shards of its own

Whether the script has loaded something is seen by its optimizers and schedulers: they have taken
steps. Plain SGD has no state to see it by.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchelastic.errors import CheckpointError
from torchelastic.snapshot.dtensors import is_sharded, local_of


@dataclass(frozen=True)
class Loaded:
    """What each rank says when it calls `restore`, by rank."""

    #: How many steps the state has done that the script has loaded; None: it has not said.
    starts: Sequence[int | None]
    #: How many steps its optimizers and schedulers have taken at least.
    taken: Sequence[int]

    @property
    def step(self) -> int:
        """The furthest that a rank has loaded; 0: none has loaded anything, for all they say."""
        return max(start or 0 for start in self.starts)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have loaded that."""
        return [rank for rank, start in enumerate(self.starts) if start == self.step]

    @property
    def unsaid(self) -> int:
        """How many steps a state has taken of which no rank has said what it is; 0: it is new."""
        return max(self.taken) if all(start is None for start in self.starts) else 0


def checked(start: int | None) -> int | None:
    """The `start` of a user, as a plain number."""
    if start is None:
        return None
    if (number := operator.index(start)) < 0:
        raise ValueError(f"restore(start={number}): start must be 0 or more.")
    return number


def unsaid_start(taken: int) -> CheckpointError:
    return CheckpointError(
        "restore() found no snapshot and no checkpoint, but the script has loaded a state: the "
        f"optimizer or scheduler has taken at least {taken} steps. Pass the number of steps done: "
        f"restore(start={taken}) if that is right, or start=0 to count from 0."
    )


def different_starts(loaded: Loaded) -> str:
    """What is wrong where not all ranks have loaded the same."""
    first = loaded.ranks[0]
    other = next(rank for rank in range(len(loaded.starts)) if rank not in loaded.ranks)
    return (
        f"Ranks loaded different states: rank {first} called restore(start={loaded.step}), "
        f"rank {other} called restore(start={loaded.starts[other]})"
    )


def steps_taken(optimizers: Iterable[Optimizer], parts: Iterable[Any]) -> int:
    """How many steps optimizers and schedulers have taken, at least; 0: they are new."""
    states = (entry for optimizer in optimizers for entry in optimizer.state.values())
    taken = [_steps_of(entry) for entry in states if isinstance(entry, Mapping)]
    epochs = [getattr(part, "last_epoch", 0) for part in parts]
    return max([0, *taken, *(epoch for epoch in epochs if isinstance(epoch, int))])


def _steps_of(entry: Mapping[str, Any]) -> int:
    """Of one parameter. Some optimizers make their state at once, of zeros, and count from 0."""
    step = entry.get("step")
    if isinstance(step, int | float):
        return int(step)
    if isinstance(step, torch.Tensor):
        return int(step.item())
    tensors = (value for value in entry.values() if isinstance(value, torch.Tensor))
    local = (local_of(tensor) if is_sharded(tensor) else tensor for tensor in tensors)
    return int(any(bool(tensor.any()) for tensor in local))
