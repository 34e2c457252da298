"""A module name of 0.2's."""

from torchelastic.compat.old_names import __getattr__  # noqa: F401
from torchelastic.compat.release02.agent_api import *  # noqa: F403
