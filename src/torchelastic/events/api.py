"""Events of a user's own, sent where a handler takes them; by default nowhere. The names are 0.2's.

0.2.1 has `Event(name, type, metadata)`, 0.2.2 and torch have `Event(name, source, timestamp,
metadata)`: both are understood, and `type` and `source` are one field. What torchelastic itself
does is in its event log.
"""

from __future__ import annotations

import json
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
    "record",
    "record_event",
]

EventMetadataValue = str | int | float | bool | None
Metadata = Mapping[str, EventMetadataValue]


class EventSource(str, Enum):
    """Who an event comes from."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@dataclass(init=False)
class Event:
    """Something that happened."""

    name: str
    source: EventSource | str
    #: Milliseconds since 1970; 0: not said.
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
        """0.2.1's name of the source."""
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
    """Takes events somewhere."""

    @abstractmethod
    def record(self, event: Event) -> None: ...


class ConsoleEventHandler(EventHandler):
    """One line on stdout for each event."""

    def record(self, event: Event) -> None:
        print(f"[{time.time()}] {event.serialize()}", flush=True)


class NullEventHandler(EventHandler):
    """Takes events nowhere."""

    def record(self, event: Event) -> None:
        return None


_default: EventHandler = NullEventHandler()
_handlers: dict[str, EventHandler] = {"console": ConsoleEventHandler(), "null": NullEventHandler()}


def configure(handler: EventHandler, event_type: str | None = None) -> None:
    """The handler of one type of events, or of all that have none of their own."""
    global _default
    if event_type is None:
        _default = handler
    else:
        _handlers[event_type] = handler


def record(event: Event | str, destination: str = "", metadata: Metadata | None = None) -> None:
    """Send an event to a destination: `null`, `console`, or one that was configured.

    In 0.2.1's way: the name of an event, its type, its metadata.
    """
    if isinstance(event, Event):
        _handlers.get(destination, _default).record(event)
    else:
        record_event(Event(event, destination or "default", metadata or {}))


def record_event(event: Event) -> None:
    """Send an event to the handler of its type."""
    _handlers.get(event.type, _default).record(event)
