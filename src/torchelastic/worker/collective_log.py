"""The last collectives of a worker, on its slate: which it has launched, and which it waits for.

A part of the slate's header page, bytes 512 to 1023, so that the agent reads them of a worker that
hangs, whatever it hangs in. Written by the training thread, without a lock or a system call. They
are numbered in each group: who has launched the same number in a group is in the same collective.

Layout: what is waited for, then a row for each group, as far as there is room. A row has the number
of the operation among those of all groups, its number in the group, its name, and the group's name.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

AT, END = 512, 1024
#: generation, whether something is waited for, the row of its group (-1: of none), its number in
#: the group (0: it has none), its name.
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
    """A collective: its name, its number in its group (0: not known), and the group's name."""

    name: str
    number: int
    group: str


class Shown(NamedTuple):
    """What a slate shows."""

    generation: int
    waits: Operation | None
    #: One for each group, the latest first.
    launched: tuple[Operation, ...]


class Collectives:
    """The worker's side. Has a mapping of its own: the slate's moves when it grows."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._rows = 0

    def enter(self, generation: int) -> None:
        """A world begins: nothing is launched in it yet."""
        self._rows = 0
        self._memory[AT:END] = bytes(END - AT)
        _WAITED.pack_into(self._memory, AT, generation, 0, NO_ROW, 0, b"")

    def row_of(self, group: str) -> int:
        """The row for a group's collectives; `NO_ROW` when there are too many groups."""
        if self._rows == ROWS:
            return NO_ROW
        row, self._rows = self._rows, self._rows + 1
        _GROUP.pack_into(self._memory, _ROWS_AT + row * _ROW + _LAUNCHED.size, group.encode()[:16])
        return row

    def launched(self, order: int, row: int, number: int, name: bytes) -> None:
        """An operation is launched, the `order`-th of all groups."""
        _LAUNCHED.pack_into(self._memory, _ROWS_AT + row * _ROW, order, number, name)

    def waits(self, row: int, number: int, name: bytes) -> None:
        """The training thread waits for this from now on."""
        _WAITS.pack_into(self._memory, _WAITS_AT, 1, row, number, name)

    def goes_on(self) -> None:
        """It does not wait any more."""
        self._memory[_WAITING] = _NOT

    def close(self) -> None:
        self._memory.close()


def read(descriptor: int) -> Shown:
    """For an agent. The worker writes meanwhile: a name may be half of one and half of another."""
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
