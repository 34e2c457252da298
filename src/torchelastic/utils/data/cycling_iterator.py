"""A module name of 0.1's."""

from torchelastic.compat.release01.data_utilities import CyclingIterator

__all__ = ["CyclingIterator"]
