"""Any process: the event log, written by every agent and read by everything else.

types (what can happen) -> record (a line) -> log (files) -> merge (one log out of several)
    -> analysis/ (view, goodput, recoveries, hangs, ...) -> words (events as sentences)

The names here are 0.2's, for a script's own events (`api`).
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
