"""`train` and `run_train`, under the module name they had in release 0.1, and steps for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchelastic.training.coordinator import Coordinator
from torchelastic.training.loop import Options
from torchelastic.training.loop import train as _train
from torchelastic.training.state import State

__all__ = ["MAX_FAILURES", "run_train", "to_generator", "train"]

#: The default of `max_failures`. In 0.1 all failures of a process counted; here only errors of user
#: code do, and getting past the furthest step resets the count.
MAX_FAILURES = 100

TrainStep = Callable[[Any], Any]
StepGenerator = Callable[[Any], Iterator[Any]]


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


S = TypeVar("S", bound=State)


def train(
    coordinator: Coordinator,
    train_step: TrainStep,
    state: S,
    *,
    snapshot_every: int = 1,
    checkpoint_every: int | None = None,
    max_failures: int | None = None,
) -> S:
    """Call `train_step(state)` until it raises StopIteration on some worker; return the state.

    When another worker is lost, this call continues: it rolls back the step in flight, builds a new
    world, calls `state.sync()`, and takes the step again. The table in
    `torchelastic.training.outcome` maps exceptions to actions.

    `snapshot_every`: call `state.snapshot()` every this many steps; after a failed step, all steps
    since the last call are repeated. `checkpoint_every`: write a checkpoint every this many steps,
    with the manager set by `torchelastic.checkpoint.set_checkpoint_manager`. `max_failures`: retry
    this many errors of user code in this process; getting past the furthest step resets the count.
    """
    options = _options(snapshot_every, checkpoint_every, max_failures)
    return _train(coordinator, Function(train_step), state, options)  # type: ignore[return-value]


def run_train(
    coordinator: Coordinator,
    train_step_gen: StepGenerator,
    state: S,
    *,
    snapshot_every: int = 1,
    checkpoint_every: int | None = None,
    max_failures: int | None = None,
) -> S:
    """Run `train` with a generator: `train_step_gen(state)` takes a step for each value it yields.

    It is created again in every world. Its end is the end of the data. It yields nothing, or a
    pair whose second item is a `WorkerStats`.
    """
    options = _options(snapshot_every, checkpoint_every, max_failures)
    return _train(coordinator, Generator(train_step_gen), state, options)  # type: ignore[return-value]


def to_generator(train_step: TrainStep) -> StepGenerator:
    """Turn a step function for `train` into a generator for `run_train`."""

    def steps(state: S) -> Iterator[Any]:
        while True:
            try:
                yield train_step(state)
            except StopIteration:
                return

    return steps


def _options(
    snapshot_every: int, checkpoint_every: int | None, max_failures: int | None
) -> Options:
    return Options(
        snapshot_every=snapshot_every,
        checkpoint_every=checkpoint_every,
        max_failures=MAX_FAILURES if max_failures is None else max_failures,
    )
