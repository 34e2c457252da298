"""`from torchelastic.p2p import CoordinatorP2P`: where the first release had it."""

from __future__ import annotations

from torchelastic.training.coordinator import CoordinatorP2P

__all__ = ["CoordinatorP2P"]
