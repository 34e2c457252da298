"""Import path of release 0.1."""

from torchelastic.compat.collectives import get_rank

__all__ = ["get_rank"]
