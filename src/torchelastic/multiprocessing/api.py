"""A module name of 0.2's."""

from torchelastic.compat.multiprocessing_api import *  # noqa: F403
from torchelastic.compat.old_names import __getattr__  # noqa: F401
