"""A worker's timers in memory that its agent reads: set and cleared without a system call.

The agent needs no help of the worker to see that one has expired, so it does not matter who holds
the GIL there, or what for the worker hangs.

Layout: rows of 256 bytes. The first says how many others have been in use. A row has the time at
which its timer expires (0: none), how long that was ahead, and the scope. The time is written last,
and is all that is cleared: eight bytes in one store. Behind the rows, the worker writes its stacks
when it is asked to.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from typing import NamedTuple

#: The type of the message by which a worker hands its table to its agent.
MESSAGE = "timers"
ROW_BYTES = 256
#: Timers that a worker may have at once.
MOST = 1023
#: Where the rows end and the stacks begin. Memory is taken as it is written, a page at a time.
STACKS_AT = ROW_BYTES * (MOST + 1)

_USED = struct.Struct("@q")
_EXPIRES_AT = struct.Struct("@d")
#: After the time: how long it was ahead, bytes of the scope.
_REST = struct.Struct("@dH")
_REST_AT = _EXPIRES_AT.size
_SCOPE_AT = _REST_AT + _REST.size
_SCOPE_BYTES = ROW_BYTES - _SCOPE_AT
_NONE = _EXPIRES_AT.pack(0.0)


class Timer(NamedTuple):
    """A row in use. Two that are equal are the same timer, not another one in the same row."""

    row: int
    #: By `time.monotonic()`, the same for all processes of a machine.
    expires_at: float
    after: float
    scope: str


class Table:
    """The worker's side."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("torchelastic-timers", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, STACKS_AT)
        self._memory = mmap.mmap(self.descriptor, STACKS_AT)
        #: Rows that are not in use any more. `pop` and `append` are atomic: no lock is needed.
        self._free: list[int] = []
        self._used = 0
        self._growing = threading.Lock()
        #: What is written in each row but for the time: a loop sets the same timer again and again.
        self._written: dict[int, tuple[str, float]] = {}

    def set(self, scope: str, after: float, expires_at: float) -> int:
        """Set a timer; returns its row."""
        try:
            row = self._free.pop()
        except IndexError:
            row = self._new_row()
        if self._written.get(row) != (scope, after):
            self._write(row, scope, after)
        _EXPIRES_AT.pack_into(self._memory, row * ROW_BYTES, expires_at)
        return row

    def clear(self, row: int) -> None:
        """The timer in this row is no more."""
        begin = row * ROW_BYTES
        self._memory[begin : begin + _REST_AT] = _NONE
        self._free.append(row)

    def _write(self, row: int, scope: str, after: float) -> None:
        # The end says more than the beginning where a path is long.
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
    """The timers that are set. Whatever else the memory holds is the worker's own mistake."""
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
    """As it may be shown on a terminal: no escape sequences, no second line."""
    return "".join(letter if letter.isprintable() else "?" for letter in scope)
