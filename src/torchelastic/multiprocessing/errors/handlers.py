"""A module name of 0.2's."""

from torchelastic.launcher.error_handler import get_error_handler

__all__ = ["get_error_handler"]
