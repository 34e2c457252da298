"""A worker's timers in memory that its agent reads: set and cleared without a system call.

The agent sees an expired timer without help from the worker, whatever the worker is hung in, even
if C code holds its GIL.

Layout: rows of 256 bytes. The first has the number of rows in use so far. Each other row has the
time at which its timer expires (0: none), its duration, and the scope. The time is written last and
is the only part that is cleared: eight bytes in one store. After the rows, the worker writes its
stacks on request.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from torchelastic.system.shared_memory import Field, SharedMemory, Text
from torchelastic.system.text import printable

#: The type of the message that passes the table to the agent.
MESSAGE = "timers"
ROW_BYTES = 256
#: The most timers of a worker at once.
MOST = 1023
#: The offset of the stacks, after the rows. Memory is allocated by page, when written.
STACKS_AT = ROW_BYTES * (MOST + 1)

_USED = Field("@q")
_EXPIRES_AT = Field("@d")
_AFTER = Field("@d", _EXPIRES_AT.end)
_SCOPE = Text(_AFTER.end, ROW_BYTES)
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
        shared = SharedMemory("timers", STACKS_AT)
        self.descriptor, self._memory, self.close = shared.descriptor, shared.map, shared.close
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
        self._memory[begin : begin + _EXPIRES_AT.size] = _NONE
        self._free.append(row)

    def _write(self, row: int, scope: str, after: float) -> None:
        # The end of a long path is more useful than its beginning.
        text = scope.encode(errors="backslashreplace")[-_SCOPE.room :]
        begin = row * ROW_BYTES
        _AFTER.pack_into(self._memory, begin + _AFTER.at, after)
        _SCOPE.write(self._memory, begin, text)
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


def read(descriptor: int) -> list[Timer]:
    """Read the timers that are set; ignores any other content."""
    used = min(max((_USED.read(descriptor) or (0,))[0], 0), MOST)
    data = os.pread(descriptor, used * ROW_BYTES, ROW_BYTES)
    rows = (_parse(row + 1, data[row * ROW_BYTES :]) for row in range(len(data) // ROW_BYTES))
    return [timer for timer in rows if timer is not None]


def _parse(row: int, data: bytes) -> Timer | None:
    (expires_at,) = _EXPIRES_AT.of(data)
    if not expires_at > 0:
        return None
    return Timer(row, expires_at, _AFTER.of(data)[0], printable(_SCOPE.of(data)))
