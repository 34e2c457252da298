"""What a worker reports, in memory that its agent reads: the last value of each of a few metrics.

A value costs no system call and no lock. Layout: a row for each name. It has how many values there
have been, the last one, and that number again; then the name, which is written before the first
value. A row with two different numbers is being written: whoever reads it takes the next one.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

#: The type of the message by which a worker hands its board to its agent.
MESSAGE = "metrics"
#: Names that a board has room for.
MOST = 8
ROW_BYTES = 128
SIZE = ROW_BYTES * MOST
#: Seconds between two looks at what is no Python number: a GPU may have to be waited for.
LOOK = 0.5

_VALUE = struct.Struct("@qdq")
_LENGTH = struct.Struct("@H")
_LENGTH_AT = _VALUE.size
_NAME_AT = _LENGTH_AT + _LENGTH.size
_NAME_BYTES = ROW_BYTES - _NAME_AT


class Row(NamedTuple):
    """The last value of a metric, and which one it is, counted from 1."""

    name: str
    number: int
    value: float


class MetricTable:
    """The worker's side."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("torchelastic-metrics", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        #: By name: where its row begins, and how many values there have been.
        self._rows: dict[str, tuple[int, int]] = {}
        #: By name: when what is no Python number may be looked at again.
        self._due: dict[str, float] = {}
        self._full = False

    def put(self, name: str, value: Any) -> None:
        """The value of a metric now. What is no number is for handlers only."""
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
        self._due[name] = now + LOOK
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
        text = name.encode(errors="backslashreplace")[:_NAME_BYTES]
        _LENGTH.pack_into(self._memory, begin + _LENGTH_AT, len(text))
        self._memory[begin + _NAME_AT : begin + _NAME_AT + len(text)] = text
        row = self._rows[name] = (begin, 0)
        return row

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def _number(value: Any) -> float | None:
    """As a float; None for what cannot be one, which must not end the training that reports it."""
    detach = getattr(value, "detach", None)  # a tensor that has a gradient warns otherwise
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # torch's words for a tensor of several numbers, a complex one, or one without any content.
        log.debug("a metric value is not a number, so only handlers get it: %s", error)
        return None


def read(descriptor: int) -> list[Row]:
    """The rows that are whole. Whatever else the memory holds is the worker's own mistake."""
    data = os.pread(descriptor, SIZE, 0)
    rows = (_parse(data[begin:]) for begin in range(0, len(data) - ROW_BYTES + 1, ROW_BYTES))
    return [row for row in rows if row is not None]


def _parse(data: bytes) -> Row | None:
    count, value, again = _VALUE.unpack_from(data)
    if count <= 0 or count != again:
        return None
    (length,) = _LENGTH.unpack_from(data, _LENGTH_AT)
    text = data[_NAME_AT : _NAME_AT + min(length, _NAME_BYTES)]
    return Row(text.decode(errors="ignore"), count, value)
