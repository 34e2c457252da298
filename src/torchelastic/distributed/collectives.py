"""A module name of 0.1's."""

from torchelastic.compat.collectives import *  # noqa: F403
