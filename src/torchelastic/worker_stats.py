"""`WorkerStats`, under the module name it had in release 0.1."""

from __future__ import annotations

from torchelastic.training.coordinator import SimpleWorkerStats, WorkerStats

__all__ = ["SimpleWorkerStats", "WorkerStats"]
