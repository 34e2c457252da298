"""The event log: what happened in a job and why, written by every agent, read by everything else.

types (what can happen) -> record (a line) -> log (files) -> merge (one story out of several)
    -> view (what the story says about a job; with ranks, recoveries, goodput)
    -> words (in sentences), trace (as a drawing), places (who had which rank)

The names here are 0.2's, for events of a user's own (`api`).
"""

# The module is loaded first: loaded later, it would take its name from 0.2's function.
import torchelastic.events.record  # noqa: F401
from torchelastic.events.api import (
    ConsoleEventHandler,
    Event,
    EventHandler,
    EventMetadataValue,
    EventSource,
    NullEventHandler,
    configure,
    record,
    record_event,
)

__all__ = [
    "ConsoleEventHandler",
    "Event",
    "EventHandler",
    "EventMetadataValue",
    "EventSource",
    "NullEventHandler",
    "configure",
    "record",
    "record_event",
]
