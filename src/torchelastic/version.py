"""A module name of 0.1's and 0.2's."""

from torchelastic import __version__

__all__ = ["__version__"]
