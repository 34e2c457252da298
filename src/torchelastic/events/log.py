"""The event log of an agent: `events.jsonl`, one JSON object per line, each written at once.

    {"v":1,"type":"world-formed","job":"j","node":"8f2c","wall":1.7e9,"mono":12.5,"generation":0,…}

`node` is the id of the agent that writes. `mono` orders the lines of all agents of one machine
since it was booted; `wall` is for people. `generation` is null where an event belongs to none.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.clock import Clock
from torchelastic.errors import ConfigError
from torchelastic.events.types import SCHEMA, Event, from_fields

log = logging.getLogger(__name__)

#: A log that grows beyond this becomes `events.jsonl.1`, in place of an older one.
MAX_BYTES = 16 * 1024 * 1024

_ENVELOPE = ("v", "type", "job", "node", "wall", "mono", "generation")

Sink = Callable[[str], None]


class EventLog:
    """Appends events to a file. A full disk costs events, never the job."""

    def __init__(
        self,
        path: Path,
        *,
        job: str,
        node: str,
        clock: Clock,
        sink: Sink | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = path
        #: Events that could not be written.
        self.dropped = 0
        self._job = job
        self._node = node
        self._clock = clock
        self._sink = sink
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0
        self._torn = False

    def emit(self, event: Event, *, generation: int | None = None) -> None:
        """Write one line."""
        text = self._line(event, generation)
        if self._sink is not None:
            self._sink(text)
        try:
            self._append(text.encode() + b"\n")
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("Events are lost: %s cannot be written (%s).", self.path, error)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _line(self, event: Event, generation: int | None) -> str:
        head = (
            SCHEMA,
            event.type,
            self._job,
            self._node,
            round(time.time(), 6),
            round(self._clock.now(), 6),
            generation,
        )
        data = dict(zip(_ENVELOPE, head, strict=True)) | event.fields()
        return json.dumps(data, separators=(",", ":"))

    def _append(self, line: bytes) -> None:
        """One `write` per line: a reader sees whole lines, whoever else appends to the file."""
        fd = self._open()
        data = b"\n" + line if self._torn else line
        written = os.write(fd, data)
        self._size += written
        # The rest of a line that a full disk cut short must not be glued to the next one.
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{written} of {len(data)} bytes were written")
        if self._size > self._max_bytes:
            self._rotate()

    def _open(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
            self._size = os.fstat(self._fd).st_size
        return self._fd

    def _rotate(self) -> None:
        self.close()
        if self.path.is_file():  # never rename a device: the path may be /dev/null
            os.replace(self.path, _rotated(self.path))


@dataclass(frozen=True, kw_only=True)
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

    @classmethod
    def parse(cls, line: bytes) -> Record | None:
        """None for what is no event: half a line, junk, a later version of the format."""
        try:
            data = json.loads(line)
            if data.pop("v") != SCHEMA:
                return None
            head = {name: data.pop(name) for name in _ENVELOPE[1:]}
            event = from_fields(head["type"], data)
            record = cls(**head, event=event, fields=data)
            record._check()
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return record

    def _check(self) -> None:
        names = (self.type, self.job, self.node)
        times = (self.wall, self.mono)
        if not all(isinstance(name, str) for name in names) or not all(
            isinstance(time, float | int) for time in times
        ):
            raise TypeError("not an event")
        if not isinstance(self.generation, int | None):
            raise TypeError("not a generation")


def read(path: Path) -> Iterator[Record]:
    """The records of a log, oldest first, those rotated away included. Junk lines are skipped."""
    for part in (_rotated(path), path):
        if part.exists():
            with part.open("rb") as lines:
                for line in lines:
                    if record := Record.parse(line):
                        yield record


def sink_for(handler: str) -> Sink | None:
    """Where else events go (`--event-log-handler`): nowhere, or as lines to stderr."""
    if handler in ("null", "dynamic_rendezvous"):  # torch's second name for nowhere
        return None
    if handler == "console":
        return _to_stderr
    raise ConfigError(f"--event-log-handler does not know '{handler}': write null or console.")


def _to_stderr(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError as error:
        log.debug("stderr takes no events: %s", error)


def _rotated(path: Path) -> Path:
    return path.with_name(path.name + ".1")
