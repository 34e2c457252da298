"""A module name of 0.1's."""

from torchelastic.events.named_events import *  # noqa: F403
