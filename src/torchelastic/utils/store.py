"""A module name of 0.2's."""

from torchelastic.compat.collectives import barrier, get_all, synchronize

__all__ = ["barrier", "get_all", "synchronize"]
