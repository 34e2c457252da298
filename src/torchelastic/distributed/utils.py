"""A module name of 0.1's."""

from torchelastic.compat.release01.collectives import get_rank

__all__ = ["get_rank"]
