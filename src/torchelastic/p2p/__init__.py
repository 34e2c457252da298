"""Worker process: `CoordinatorP2P`, under the module name of 0.1."""

from __future__ import annotations

from torchelastic.training.coordinator import CoordinatorP2P

__all__ = ["CoordinatorP2P"]
