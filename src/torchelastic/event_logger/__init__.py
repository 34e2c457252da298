"""Worker process: named events, with the names of 0.1."""

from torchelastic.events.named_events import *  # noqa: F403
