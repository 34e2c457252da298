"""A module name of 0.1's, which its examples import."""

from torchelastic.training.coordinator import CoordinatorP2P

__all__ = ["CoordinatorP2P"]
