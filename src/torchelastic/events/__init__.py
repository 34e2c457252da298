"""Any process: the event log, written by every agent and read by everything else.

types (event types) -> record (a line) -> log (files) -> merge (several logs into one)
    -> timeline (generations as records) -> analysis/ (view, goodput, recoveries, hangs, ...)
    -> words (events as sentences)

The names here are the 0.2 API (`api`), with which a script records events.
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
    get_logging_handler,
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
    "get_logging_handler",
    "record",
    "record_event",
]
