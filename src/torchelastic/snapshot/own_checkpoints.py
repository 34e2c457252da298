"""`restore` in a script with its own checkpoints.

The script loads its file of step N and calls `restore(start=N)`. S is the newest step that
torchelastic has, in memory or in storage:

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

We notice that the script has loaded a state by the steps of its optimizers and schedulers. Plain
SGD has no state to notice it by.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchelastic.errors import CheckpointError
from torchelastic.tensors.dtensors import local_or_whole


@dataclass(frozen=True)
class Loaded:
    """Each rank's arguments to `restore`, by rank."""

    #: The `start` argument: the steps done by the loaded state; None if not given.
    starts: Sequence[int | None]
    #: The least number of steps that its optimizers and schedulers have taken.
    taken: Sequence[int]

    @property
    def step(self) -> int:
        """The furthest step that a rank reports as loaded; 0 if none does."""
        return max(start or 0 for start in self.starts)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have loaded that step."""
        return [rank for rank, start in enumerate(self.starts) if start == self.step]

    @property
    def unsaid(self) -> int:
        """The steps taken by a state for which no rank passed `start`; 0 if it is new."""
        return max(self.taken) if all(start is None for start in self.starts) else 0


def checked(start: int | None) -> int | None:
    """Return the user's `start` as a plain number."""
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
    """Describe the difference if ranks have loaded different steps."""
    first = loaded.ranks[0]
    other = next(rank for rank in range(len(loaded.starts)) if rank not in loaded.ranks)
    return (
        f"Ranks loaded different states: rank {first} called restore(start={loaded.step}), "
        f"rank {other} called restore(start={loaded.starts[other]})"
    )


def steps_taken(optimizers: Iterable[Optimizer], parts: Iterable[Any]) -> int:
    """Return the least number of steps that optimizers and schedulers have taken."""
    states = (entry for optimizer in optimizers for entry in optimizer.state.values())
    taken = [_steps_of(entry) for entry in states if isinstance(entry, Mapping)]
    epochs = [getattr(part, "last_epoch", 0) for part in parts]
    return max([0, *taken, *(epoch for epoch in epochs if isinstance(epoch, int))])


def _steps_of(entry: Mapping[str, Any]) -> int:
    """Return one parameter's steps. Some optimizers create their state at once, with step 0."""
    step = entry.get("step")
    if isinstance(step, int | float):
        return int(step)
    if isinstance(step, torch.Tensor):
        return int(step.item())
    tensors = (value for value in entry.values() if isinstance(value, torch.Tensor))
    return int(any(bool(local_or_whole(tensor).any()) for tensor in tensors))
