"""A module name of 0.2's."""

from torchelastic.metrics import *  # noqa: F403
