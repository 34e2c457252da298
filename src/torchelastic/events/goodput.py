"""A module name that docs/guides/goodput.md has given users."""

from torchelastic.events.analysis.goodput import Goodput, goodput

__all__ = ["Goodput", "goodput"]
