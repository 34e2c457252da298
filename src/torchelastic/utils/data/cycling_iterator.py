"""A module name of 0.1's."""

from torchelastic.compat.data_utilities import CyclingIterator

__all__ = ["CyclingIterator"]
