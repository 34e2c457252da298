"""One line of an event log.

    {"v":1,"type":"world-formed","job":"j","node":"8f2c","wall":1.7e9,"mono":12.5,"generation":0,…}

`node` is the id of the agent that wrote it. `mono` orders the lines of all agents of one machine
since boot; `wall` is for people. `generation` is null if an event belongs to none. A line of the
leader's log of all agents also has `heard`: the estimated time on the leader's `mono`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from torchelastic.events.types import SCHEMA, Event, from_fields

#: Fields of every line, before those of its event.
ENVELOPE = ("v", "type", "job", "node", "wall", "mono", "generation")
#: An additional field in the leader's log of all agents.
HEARD = "heard"

#: Exceptions from parsing an invalid line.
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of an event log."""

    type: str
    job: str
    node: str
    wall: float
    mono: float
    generation: int | None
    #: None when this version does not know the type.
    event: Event | None
    fields: dict[str, Any] = field(default_factory=dict)
    #: Estimated time on the monotonic clock of the leader that collected it.
    heard: float | None = None

    @property
    def time(self) -> float:
        """The time that orders the records of a job; comparable only within one merged log."""
        return self.mono if self.heard is None else self.heard

    @property
    def key(self) -> tuple[str, float, str]:
        """The same for two copies of a line."""
        return (self.node, self.mono, self.type)

    def heard_at(self, time: float) -> Record:
        """Return the record with a time on the leader's clock."""
        return replace(self, heard=round(time, 6))

    def line(self) -> str:
        """Return the line as written, without the newline."""
        head = (SCHEMA, self.type, self.job, self.node, self.wall, self.mono, self.generation)
        data = dict(zip(ENVELOPE, head, strict=True))
        if self.heard is not None:
            data[HEARD] = self.heard
        # A parsed record is written as it was read, with fields of a later version.
        own = self.event.fields() if self.event is not None and not self.fields else self.fields
        return json.dumps(data | own, separators=(",", ":"))

    @classmethod
    def parse(cls, line: bytes | str) -> Record | None:
        """Parse a line; None for an incomplete or invalid line or a later format version."""
        try:
            data = json.loads(line)
            if data.pop("v") != SCHEMA:
                return None
            head = {name: data.pop(name) for name in ENVELOPE[1:]}
            for name in ("type", "job", "node"):
                head[name] = intern(head[name])  # one text for all the lines of a long log
            head[HEARD] = data.pop(HEARD, None)
            event = from_fields(head["type"], data)
            record = cls(**head, event=event, fields=data)
            record._check()
        except _PARSE_ERRORS:
            return None
        return record

    def _check(self) -> None:
        if not all(isinstance(name, str) for name in (self.type, self.job, self.node)):
            raise TypeError("not an event")
        times = (self.wall, self.mono, 0.0 if self.heard is None else self.heard)
        if not all(isinstance(time, float | int) and math.isfinite(time) for time in times):
            raise TypeError("not a time")
        if not isinstance(self.generation, int | None):
            raise TypeError("not a generation")
