"""`Coordinator` and its exceptions, under the module name they had in release 0.1."""

from __future__ import annotations

from torchelastic.errors import NonRetryableException, StopException
from torchelastic.training.coordinator import Coordinator

__all__ = ["Coordinator", "NonRetryableException", "StopException"]
