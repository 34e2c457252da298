"""A module name of 0.1's."""

from torchelastic.compat.release01.cycling_iterator import CyclingIterator

__all__ = ["CyclingIterator"]
