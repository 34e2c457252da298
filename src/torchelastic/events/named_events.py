"""Events of a user's own, by name, sent where a handler takes them; by default nowhere.

The names are 0.1's. What torchelastic itself does is in its event log (`torchelastic.events`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class EventLogHandler(ABC):
    """Takes events somewhere."""

    @abstractmethod
    def log_event(self, event_name: str, message: str) -> None: ...


class ConsoleEventLogHandler(EventLogHandler):
    """One line on stdout for each event."""

    def log_event(self, event_name: str, message: str) -> None:
        print(f"[{time.time()}][{event_name}]: {message}", flush=True)


class NullEventLogHandler(EventLogHandler):
    """Takes events nowhere."""

    def log_event(self, event_name: str, message: str) -> None:
        return None


_default: EventLogHandler = NullEventLogHandler()
_handlers: dict[str, EventLogHandler] = {}


def configure(handler: EventLogHandler, group: str | None = None) -> None:
    """The handler of one group, or of all that have none of their own."""
    global _default
    if group is None:
        _default = handler
    else:
        _handlers[group] = handler


def get_event_logger(group: str | None = None) -> EventLogHandler:
    return _handlers.get(group, _default) if group is not None else _default
