"""Launching process: the agent API of torchelastic 0.2."""

from torchelastic.compat.agent_api import *  # noqa: F403
