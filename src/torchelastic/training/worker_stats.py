"""What a `train_step` may tell of its speed."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WorkerStats(ABC):
    """Statistics of one worker, returned by its `train_step` beside the state."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """How fast this worker is: larger is faster, in a unit of its own. None: not known."""


class SimpleWorkerStats(WorkerStats):
    """A rate, and nothing else."""

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        return self.progress_rate
