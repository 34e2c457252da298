"""A worker's timers in memory that its agent reads: set and cleared without a system call.

The agent sees an expired timer without help from the worker, whatever the worker is hung in and
whoever holds its GIL.

Layout: rows of 256 bytes. The first has the number of rows in use so far. Each other row has the
time at which its timer expires (0: none), its duration, and the scope. The time is written last and
is the only part that is cleared: eight bytes in one store. After the rows, the worker writes its
stacks on request.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from typing import NamedTuple

#: The type of the message that passes the table to the agent.
MESSAGE = "timers"
ROW_BYTES = 256
#: The most timers of a worker at once.
MOST = 1023
#: The offset of the stacks, after the rows. Memory is allocated by page, when written.
STACKS_AT = ROW_BYTES * (MOST + 1)

_USED = struct.Struct("@q")
_EXPIRES_AT = struct.Struct("@d")
#: After the time: the duration, and the length of the scope in bytes.
_REST = struct.Struct("@dH")
_REST_AT = _EXPIRES_AT.size
_SCOPE_AT = _REST_AT + _REST.size
_SCOPE_BYTES = ROW_BYTES - _SCOPE_AT
_NONE = _EXPIRES_AT.pack(0.0)


class Timer(NamedTuple):
    """A row in use. Equal values are the same timer, not another one in the same row."""

    row: int
    #: By `time.monotonic()`, the same for all processes of a machine.
    expires_at: float
    after: float
    scope: str


class TimerTable:
    """The worker's side."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("torchelastic-timers", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, STACKS_AT)
        self._memory = mmap.mmap(self.descriptor, STACKS_AT)
        #: Free rows. `pop` and `append` are atomic: no lock is needed.
        self._free: list[int] = []
        self._used = 0
        self._growing = threading.Lock()
        #: Scope and duration in each row: a loop sets the same timer again and again.
        self._written: dict[int, tuple[str, float]] = {}

    def set(self, scope: str, after: float, expires_at: float) -> int:
        """Set a timer; return its row."""
        try:
            row = self._free.pop()
        except IndexError:
            row = self._new_row()
        if self._written.get(row) != (scope, after):
            self._write(row, scope, after)
        _EXPIRES_AT.pack_into(self._memory, row * ROW_BYTES, expires_at)
        return row

    def clear(self, row: int) -> None:
        """Clear the timer in this row."""
        begin = row * ROW_BYTES
        self._memory[begin : begin + _REST_AT] = _NONE
        self._free.append(row)

    def _write(self, row: int, scope: str, after: float) -> None:
        # The end of a long path is more useful than its beginning.
        text = scope.encode(errors="backslashreplace")[-_SCOPE_BYTES:]
        begin = row * ROW_BYTES
        _REST.pack_into(self._memory, begin + _REST_AT, after, len(text))
        self._memory[begin + _SCOPE_AT : begin + _SCOPE_AT + len(text)] = text
        self._written[row] = (scope, after)

    def _new_row(self) -> int:
        with self._growing:
            if self._used == MOST:
                raise RuntimeError(
                    f"This worker already has {MOST} timers, the maximum: release some of them."
                )
            self._used += 1
            _USED.pack_into(self._memory, 0, self._used)
            return self._used

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def read(descriptor: int) -> list[Timer]:
    """Read the timers that are set; ignores any other content."""
    head = os.pread(descriptor, _USED.size, 0)
    if len(head) < _USED.size:
        return []
    used = min(max(_USED.unpack(head)[0], 0), MOST)
    data = os.pread(descriptor, used * ROW_BYTES, ROW_BYTES)
    rows = (_parse(row + 1, data[row * ROW_BYTES :]) for row in range(len(data) // ROW_BYTES))
    return [timer for timer in rows if timer is not None]


def _parse(row: int, data: bytes) -> Timer | None:
    (expires_at,) = _EXPIRES_AT.unpack_from(data)
    if not expires_at > 0:
        return None
    after, length = _REST.unpack_from(data, _REST_AT)
    text = data[_SCOPE_AT : _SCOPE_AT + min(length, _SCOPE_BYTES)].decode(errors="ignore")
    return Timer(row, expires_at, after, printable(text))


def printable(scope: str) -> str:
    """Replace characters that a terminal should not show, such as escape sequences."""
    return "".join(letter if letter.isprintable() else "?" for letter in scope)
