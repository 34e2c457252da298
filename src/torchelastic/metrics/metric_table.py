"""The metric table: the last values that a worker's script has put, in memory its agent reads.
The metrics that the agent serves are in `job_metrics`.

A value costs no system call and no lock. Layout: a row for each name. It has the count of values so
far, the last value, and the count again; then the name, which is written before the first value. A
row whose counts differ is being written: readers skip it.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, NamedTuple

from torchelastic.system.shared_memory import Field, SharedMemory, Text

log = logging.getLogger(__name__)

#: The type of the message that passes the table to the agent.
MESSAGE = "metrics"
#: The most names in a table.
MOST = 8
ROW_BYTES = 128
SIZE = ROW_BYTES * MOST
#: Seconds between two conversions of a tensor: each may have to wait for a GPU.
CONVERSION_INTERVAL = 0.5

_VALUE = Field("@qdq")
_NAME = Text(_VALUE.end, ROW_BYTES)


class MetricRow(NamedTuple):
    """The last value of a metric, and its number, counted from 1."""

    name: str
    number: int
    value: float


class MetricTable:
    """The worker's side."""

    def __init__(self) -> None:
        shared = SharedMemory("metrics", SIZE)
        self.descriptor, self._memory, self.close = shared.descriptor, shared.map, shared.close
        #: By name: the offset of its row, and the count of values.
        self._rows: dict[str, tuple[int, int]] = {}
        #: By name: when a value that is not a Python number may be converted again.
        self._due: dict[str, float] = {}
        self._full = False

    def put(self, name: str, value: Any) -> None:
        """Set the value of a metric. Values that are not numbers are ignored."""
        number = float(value) if isinstance(value, float) else self._looked_at(name, value)
        row = self._rows.get(name) or self._new_row(name)
        if number is None or row is None:
            return
        begin, count = row[0], row[1] + 1
        _VALUE.pack_into(self._memory, begin, count, number, count)
        self._rows[name] = (begin, count)

    def _looked_at(self, name: str, value: Any) -> float | None:
        if isinstance(value, int):
            return _number(value)
        now = time.monotonic()
        if now < self._due.get(name, 0.0):
            return None
        self._due[name] = now + CONVERSION_INTERVAL
        return _number(value)

    def _new_row(self, name: str) -> tuple[int, int] | None:
        if len(self._rows) == MOST:
            if not self._full:
                self._full = True
                log.warning(
                    "A job shows at most %d metrics: %r and later ones go to metric handlers only.",
                    MOST,
                    name,
                )
            return None
        begin = ROW_BYTES * len(self._rows)
        text = name.encode(errors="backslashreplace")[: _NAME.room]
        _NAME.write(self._memory, begin, text)
        row = self._rows[name] = (begin, 0)
        return row


def _number(value: Any) -> float | None:
    """Convert to a float; None if that fails, because reporting must not end the training."""
    detach = getattr(value, "detach", None)  # a tensor that has a gradient warns otherwise
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # torch raises these for a tensor of several numbers, a complex one, or a meta tensor.
        log.debug("a metric value is not a number, so only handlers get it: %s", error)
        return None


def read(descriptor: int) -> list[MetricRow]:
    """Read the rows that are complete; ignores any other content."""
    data = os.pread(descriptor, SIZE, 0)
    rows = (_parse(data[begin:]) for begin in range(0, len(data) - ROW_BYTES + 1, ROW_BYTES))
    return [row for row in rows if row is not None]


def _parse(data: bytes) -> MetricRow | None:
    count, value, again = _VALUE.of(data)
    return MetricRow(_NAME.of(data), count, value) if count == again > 0 else None
