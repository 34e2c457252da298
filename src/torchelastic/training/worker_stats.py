"""Statistics that a `train_step` may return."""

from __future__ import annotations

from abc import ABC, abstractmethod


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
