"""The last collectives of a worker on its status page: those launched, and the one it waits for.

They are bytes 512 to 1023 of the status page's header, so that the agent can read them whatever the
worker is hung in. The training thread writes them without a lock or a system call. They are
numbered in each group: workers with the same number in a group are in the same collective.

Layout: the operation it waits for, then a row for each group while there is room. A row has the
number of the operation among those of all groups, its number in the group, its name, and the
group's name.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

AT, END = 512, 1024
#: generation, 1 if it waits, then of the operation it waits for: the row of its group (-1: none),
#: its number in the group (0: none), its name.
_WAITED = struct.Struct("=qqqq24s")
#: Of `_WAITED`, what follows the generation.
_WAITS = struct.Struct("=qqq24s")
_WAITS_AT = AT + 8
_WAITING, _NOT = slice(_WAITS_AT, _WAITS_AT + 8), bytes(8)
_LAUNCHED = struct.Struct("=qq24s")
_GROUP = struct.Struct("=16s")
_ROWS_AT = AT + _WAITED.size
_ROW = _LAUNCHED.size + _GROUP.size
ROWS = (END - _ROWS_AT) // _ROW

#: Row, number in the group, name.
Mark = tuple[int, int, bytes]
NO_ROW = -1


class Operation(NamedTuple):
    """A collective: its name, its number in its group (0: unknown), and the group's name."""

    name: str
    number: int
    group: str


class Shown(NamedTuple):
    """The collectives on a status page."""

    generation: int
    waits: Operation | None
    #: One for each group, the latest first.
    launched: tuple[Operation, ...]


class Collectives:
    """The worker's side. Has its own mapping: that of the status page moves when it grows."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._rows = 0

    def enter(self, generation: int) -> None:
        """Clear the log, because a world begins."""
        self._rows = 0
        self._memory[AT:END] = bytes(END - AT)
        _WAITED.pack_into(self._memory, AT, generation, 0, NO_ROW, 0, b"")

    def row_of(self, group: str) -> int:
        """Allocate the row for a group; `NO_ROW` if there are too many groups."""
        if self._rows == ROWS:
            return NO_ROW
        row, self._rows = self._rows, self._rows + 1
        _GROUP.pack_into(self._memory, _ROWS_AT + row * _ROW + _LAUNCHED.size, group.encode()[:16])
        return row

    def launched(self, order: int, row: int, number: int, name: bytes) -> None:
        """Record that an operation is launched, the `order`-th of all groups."""
        _LAUNCHED.pack_into(self._memory, _ROWS_AT + row * _ROW, order, number, name)

    def waits(self, row: int, number: int, name: bytes) -> None:
        """Record that the training thread waits for this."""
        _WAITS.pack_into(self._memory, _WAITS_AT, 1, row, number, name)

    def goes_on(self) -> None:
        """Record that it no longer waits."""
        self._memory[_WAITING] = _NOT

    def close(self) -> None:
        self._memory.close()


def read(descriptor: int) -> Shown:
    """Read as an agent. The worker may be writing: a name may be a mix of two."""
    page = os.pread(descriptor, END, 0)
    if len(page) < END:
        return Shown(-1, None, ())
    generation, waiting, row, number, name = _WAITED.unpack_from(page, AT)
    rows = [_row(page, each) for each in range(ROWS)]
    launched = tuple(one for order, one in sorted(rows, reverse=True) if order > 0)
    group = rows[row][1].group if 0 <= row < ROWS else ""
    waits = Operation(_text(name), number, group) if waiting else None
    return Shown(generation, waits, launched)


def _row(page: bytes, row: int) -> tuple[int, Operation]:
    at = _ROWS_AT + row * _ROW
    order, number, name = _LAUNCHED.unpack_from(page, at)
    (group,) = _GROUP.unpack_from(page, at + _LAUNCHED.size)
    return order, Operation(_text(name), number, _text(group))


def _text(data: bytes) -> str:
    text = data.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
