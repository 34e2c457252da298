"""`State`, under the module name it had in release 0.1."""

from __future__ import annotations

from torchelastic.training.state import State

__all__ = ["State"]
