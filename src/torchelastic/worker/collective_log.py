"""The last collectives of a worker on its status page: those launched, and the one it waits for.

They are bytes 512 to 1023 of the status page's header, so that the agent can read them whatever the
worker is hung in. The training thread writes them without a lock or a system call. They are
numbered in each group: workers with the same number in a group are in the same collective.

Layout: the operation it waits for, then a row for each group while there is room. A row has the
number of the operation among those of all groups, its number in the group, its name, and the
group's name.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from torchelastic.system.shared_memory import Field, map_memory
from torchelastic.system.text import printable

AT, END = 512, 1024
#: generation, 1 if it waits, then of the operation it waits for: the row of its group (-1: none),
#: its number in the group (0: none), its name.
_WAITED = Field("=qqqq24s", AT)
#: Of `_WAITED`, what follows the generation; and of that the first.
_WAITS = Field("=qqq24s", AT + 8)
_WAITING, _NOT = Field("=q", _WAITS.at).span, bytes(8)
#: In a row.
_LAUNCHED = Field("=qq24s")
_GROUP = Field("=16s", _LAUNCHED.end)
_ROWS_AT, _ROW = _WAITED.end, _GROUP.end
ROWS = (END - _ROWS_AT) // _ROW

#: Row, number in the group, name.
Mark = tuple[int, int, bytes]
NO_ROW = -1


class LoggedCollective(NamedTuple):
    """A collective: its name, its number in its group (0: unknown), and the group's name."""

    name: str
    number: int
    group: str


class ShownCollectives(NamedTuple):
    """The collectives on a status page."""

    generation: int
    waits: LoggedCollective | None
    #: One for each group, the latest first.
    launched: tuple[LoggedCollective, ...]


class Collectives:
    """The worker's side. Has its own mapping: that of the status page moves when it grows."""

    def __init__(self, descriptor: int) -> None:
        self._memory = map_memory(descriptor)
        self._rows = 0

    def enter(self, generation: int) -> None:
        """Clear the log, because a world begins."""
        self._rows = 0
        self._memory[AT:END] = bytes(END - AT)
        _WAITED.pack_into(self._memory, _WAITED.at, generation, 0, NO_ROW, 0, b"")

    def row_of(self, group: str) -> int:
        """Allocate the row for a group; `NO_ROW` if there are too many groups."""
        if self._rows == ROWS:
            return NO_ROW
        row, self._rows = self._rows, self._rows + 1
        _GROUP.pack_into(self._memory, _ROWS_AT + row * _ROW + _GROUP.at, group.encode()[:16])
        return row

    def launched(self, order: int, row: int, number: int, name: bytes) -> None:
        """Record that an operation is launched, the `order`-th of all groups."""
        _LAUNCHED.pack_into(self._memory, _ROWS_AT + row * _ROW, order, number, name)

    def waits(self, row: int, number: int, name: bytes) -> None:
        """Record that the training thread waits for this."""
        _WAITS.pack_into(self._memory, _WAITS.at, 1, row, number, name)

    def goes_on(self) -> None:
        """Record that it no longer waits."""
        self._memory[_WAITING] = _NOT

    def close(self) -> None:
        self._memory.close()


def read(descriptor: int) -> ShownCollectives:
    """Read as an agent. The worker may be writing: a name may be a mix of two."""
    page = os.pread(descriptor, END, 0)
    if len(page) < END:
        return ShownCollectives(-1, None, ())
    generation, waiting, row, number, name = _WAITED.of(page)
    rows = [_row(page, each) for each in range(ROWS)]
    launched = tuple(one for order, one in sorted(rows, reverse=True) if order > 0)
    group = rows[row][1].group if 0 <= row < ROWS else ""
    waits = LoggedCollective(_text(name), number, group) if waiting else None
    return ShownCollectives(generation, waits, launched)


def _row(page: bytes, row: int) -> tuple[int, LoggedCollective]:
    at = _ROWS_AT + row * _ROW
    order, number, name = _LAUNCHED.of(page, at)
    (group,) = _GROUP.of(page, at)
    return order, LoggedCollective(_text(name), number, _text(group))


def _text(data: bytes) -> str:
    return printable(data.rstrip(b"\0").decode(errors="replace"))
