"""A module name of 0.2's."""

from torchelastic.compat.release02.utilities import get_logger

__all__ = ["get_logger"]
