"""The 0.1 API for custom events. A handler receives them; by default they are discarded.

torchelastic's own events are in its event log (`torchelastic.events`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class EventLogHandler(ABC):
    """Receives events."""

    @abstractmethod
    def log_event(self, event_name: str, message: str) -> None: ...


class ConsoleEventLogHandler(EventLogHandler):
    """Prints one line on stdout per event."""

    def log_event(self, event_name: str, message: str) -> None:
        print(f"[{time.time()}][{event_name}]: {message}", flush=True)


class NullEventLogHandler(EventLogHandler):
    """Discards events."""

    def log_event(self, event_name: str, message: str) -> None:
        return None


_default: EventLogHandler = NullEventLogHandler()
_handlers: dict[str, EventLogHandler] = {}


def configure(handler: EventLogHandler, group: str | None = None) -> None:
    """Set the handler of one group, or the default handler."""
    global _default
    if group is None:
        _default = handler
    else:
        _handlers[group] = handler


def get_event_logger(group: str | None = None) -> EventLogHandler:
    return _handlers.get(group, _default) if group is not None else _default
