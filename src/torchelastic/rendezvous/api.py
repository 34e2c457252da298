"""A module name of 0.2's."""

from torchelastic.compat.rendezvous_api import *  # noqa: F403
