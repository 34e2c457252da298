"""The 0.2 API for custom events. A handler receives them; by default they are discarded.

0.2.1 has `Event(name, type, metadata)`, 0.2.2 and torch have `Event(name, source, timestamp,
metadata)`: both work, and `type` and `source` are the same field. torchelastic's own events are in
its event log.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

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

EventMetadataValue = str | int | float | bool | None
Metadata = Mapping[str, EventMetadataValue]


class EventSource(str, Enum):
    """The source of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@dataclass(init=False)
class Event:
    """A custom event."""

    name: str
    source: EventSource | str
    #: Milliseconds since 1970; 0: not set.
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __init__(
        self,
        name: str,
        source: EventSource | str = "default",
        timestamp: int | Metadata = 0,
        metadata: Metadata | int | None = None,
        *,
        type: str | None = None,
    ) -> None:
        if isinstance(timestamp, Mapping):  # 0.2.1's order
            timestamp, metadata = (metadata if isinstance(metadata, int) else 0), timestamp
        self.name, self.source, self.timestamp = name, type or source, timestamp
        self.metadata = dict(metadata) if isinstance(metadata, Mapping) else {}

    @property
    def type(self) -> str:
        """The source, under its name in 0.2.1."""
        return self.source.value if isinstance(self.source, EventSource) else self.source

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        known = fields["source"] in EventSource.__members__
        return Event(**{**fields, "source": EventSource[fields["source"]]} if known else fields)


class EventHandler(ABC):
    """Receives events."""

    @abstractmethod
    def record(self, event: Event) -> None: ...


class ConsoleEventHandler(EventHandler):
    """Prints one line on stdout per event."""

    def record(self, event: Event) -> None:
        print(f"[{time.time()}] {event.serialize()}", flush=True)


class NullEventHandler(EventHandler):
    """Discards events."""

    def record(self, event: Event) -> None:
        return None


_default: EventHandler = NullEventHandler()
_handlers: dict[str, EventHandler] = {"console": ConsoleEventHandler(), "null": NullEventHandler()}


def configure(handler: EventHandler, event_type: str | None = None) -> None:
    """Set the handler of one event type, or the default handler."""
    global _default
    if event_type is None:
        _default = handler
    else:
        _handlers[event_type] = handler


def record(event: Event | str, destination: str = "", metadata: Metadata | None = None) -> None:
    """Send an event to a destination: `null`, `console`, or a configured one.

    Also accepts the arguments of 0.2.1: event name, event type, metadata.
    """
    if isinstance(event, Event):
        _handlers.get(destination, _default).record(event)
    else:
        record_event(Event(event, destination or "default", metadata or {}))


def get_logging_handler(destination: str = "console") -> logging.Handler:
    """Return torch's handler of this name, to which 0.2.2 sent events: `console` or `null`."""
    of_torch = importlib.import_module("torch.distributed.elastic.events.handlers")
    handler: logging.Handler = of_torch.get_logging_handler(destination)
    return handler


def record_event(event: Event) -> None:
    """Send an event to the handler of its type."""
    _handlers.get(event.type, _default).record(event)
