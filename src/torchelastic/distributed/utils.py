"""A module name of 0.1's."""

from torchelastic.distributed.collectives import get_rank

__all__ = ["get_rank"]
