"""A step as the user writes it: a function of the state, or a generator, and its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torchelastic.training.state.state import State

TrainStep = Callable[[Any], Any]
StepGenerator = Callable[[Any], Iterator[Any]]


class Steps(Protocol):
    """The user's steps, taken one at a time."""

    def restart(self, state: State) -> None:
        """Start over with a synchronised state."""

    def run(self, state: State) -> tuple[State, Any]:
        """Take a step; return the new state and statistics. StopIteration: no more data."""


class Function:
    """`train_step(state)`, which returns nothing, or a state and statistics as in 0.1."""

    def __init__(self, train_step: TrainStep) -> None:
        self._train_step = train_step

    def restart(self, state: State) -> None:
        return

    def run(self, state: State) -> tuple[State, Any]:
        returned = self._train_step(state)
        if returned is None:
            return state, None
        after, stats = _pair(returned)
        return (after if isinstance(after, State) else state), stats


class Generator:
    """A generator of steps, created again in every world."""

    def __init__(self, make: StepGenerator) -> None:
        self._make = make
        self._steps: Iterator[Any] = iter(())

    def restart(self, state: State) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()
        self._steps = iter(self._make(state))

    def run(self, state: State) -> tuple[State, Any]:
        returned = next(self._steps)
        return state, _pair(returned)[1]


def _pair(returned: Any) -> tuple[Any, Any]:
    """Return (state, statistics) if the value is such a pair, else no statistics."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    return None, None


class WorkerStats(ABC):
    """Statistics of one worker, returned by its `train_step` beside the state."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return this worker's speed, larger is faster, in any unit; None if not known."""


class SimpleWorkerStats(WorkerStats):
    """Statistics that hold only a progress rate."""

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        return self.progress_rate
