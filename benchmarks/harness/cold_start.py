"""From the launch of a job of one node to the first step that all its workers have finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.harness.job import Job
from benchmarks.harness.launchers import OURS, TORCHRUN, Launcher

#: Seconds of two launchers started one after the other, so that both meet the same machine.
Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    """What is divided by what; with the same launcher twice it shows the noise (A/A)."""

    name: str
    first: Launcher
    second: Launcher
    workers: int


COMPARISONS = (
    Comparison("2 workers", OURS, TORCHRUN, 2),
    Comparison("1 worker", OURS, TORCHRUN, 1),
    Comparison("2 workers, A/A control", TORCHRUN, TORCHRUN, 2),
)


def first_step_seconds(launcher: Launcher, workers: int) -> float | None:
    """One cold start; None if there was no step in time."""
    with Job(launcher, workers=workers, elastic=False) as job:
        node = job.start_node()
        first = job.wait_for(
            lambda: job.history.first_finish(after=node.started), launcher.start_patience
        )
        return first.time - node.started if first else None


def measure_pairs(
    comparison: Comparison,
    count: int,
    measure: Callable[[Launcher, int], float | None] = first_step_seconds,
) -> Iterator[Pair]:
    """`count` pairs; every other one in reverse, so that going first favours neither.

    One start of each comes before them, unmeasured: it fills the disk cache for all.
    """
    both = (comparison.first, comparison.second)
    for launcher in both:
        measure(launcher, comparison.workers)
    for index in range(count):
        if index % 2 == 0:
            first = measure(both[0], comparison.workers)
            second = measure(both[1], comparison.workers)
        else:
            second = measure(both[1], comparison.workers)
            first = measure(both[0], comparison.workers)
        yield first, second
