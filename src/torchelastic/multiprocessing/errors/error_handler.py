"""A module name of 0.2's."""

from torchelastic.launcher.error_handler import ErrorHandler

__all__ = ["ErrorHandler"]
