"""`train` and `run_train`, under the module name they had in release 0.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torchelastic.training.coordinator import Coordinator
from torchelastic.training.loop import Options
from torchelastic.training.loop import train as _train
from torchelastic.training.state.state import State
from torchelastic.training.steps import Function, Generator, StepGenerator, TrainStep

__all__ = ["MAX_FAILURES", "run_train", "to_generator", "train"]

#: The limit where `max_failures` is not given. In 0.1 all failures of a process counted; here those
#: of user code do, and a step further than ever before begins the count anew.
MAX_FAILURES = 100

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

    Whatever happens to other workers, this call goes on: the step in flight is rolled back, the
    world is built anew, `state.sync()` is called, the step is taken again. Which exception leads to
    what is the table in `torchelastic.training.outcome`.

    `snapshot_every`: take the state's own snapshot before every so many steps; when a step fails,
    all since the last one are taken again. `checkpoint_every`: write a checkpoint after every so
    many steps, by the manager set with `torchelastic.checkpoint.set_checkpoint_manager`.
    `max_failures`: so many errors of user code in this process, without a step further than ever
    before between them, are tried again.
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
    """`train`, with a generator: `train_step_gen(state)` takes a step for each value it yields.

    It is made anew in every world. Its end is the end of the data. What it yields is nothing, or a
    pair whose second is a `WorkerStats`.
    """
    options = _options(snapshot_every, checkpoint_every, max_failures)
    return _train(coordinator, Generator(train_step_gen), state, options)  # type: ignore[return-value]


def to_generator(train_step: TrainStep) -> StepGenerator:
    """The generator of steps that `run_train` takes, of the function that `train` takes."""

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
