"""A module name of 0.1's."""

from torchelastic.compat.release01.collectives import *  # noqa: F403
