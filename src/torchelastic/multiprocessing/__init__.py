"""Launching process: groups of processes without an agent, with the names of 0.2."""

from torchelastic.compat.multiprocessing_api import *  # noqa: F403
