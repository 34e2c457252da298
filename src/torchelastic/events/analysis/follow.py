"""Follow files line by line while they grow, are rotated, appear and disappear."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

#: Seconds between two reads.
POLL_INTERVAL = 0.2
#: Bytes read from one file at a time.
_READ_SIZE = 4 << 20


@dataclass
class _Open:
    file: BinaryIO
    #: The beginning of a line whose end has not been written yet.
    rest: bytes = b""

    def lines(self) -> list[bytes]:
        data = self.rest + self.file.read(_READ_SIZE)
        *whole, self.rest = data.split(b"\n")
        return whole

    def is_still(self, path: Path) -> bool:
        """Return True if the path still names this file."""
        try:
            there, here = path.stat(), os.fstat(self.file.fileno())
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


class Follower:
    """Reads new lines. `close` it."""

    def __init__(self) -> None:
        self._open: dict[Path, _Open] = {}

    def skip(self, paths: Iterable[Path]) -> None:
        """Skip the current contents of these files."""
        for path in paths:
            if (opened := self._opened(path)) is not None:
                opened.file.seek(0, os.SEEK_END)

    def new_lines(self, paths: Iterable[Path]) -> list[tuple[Path, bytes]]:
        """Return new whole lines without newline, file by file."""
        return [(path, line) for path in paths for line in self._lines(path)]

    def unfinished(self) -> list[tuple[Path, bytes]]:
        """Return last lines without a newline."""
        return [(path, opened.rest) for path, opened in self._open.items() if opened.rest]

    def close(self) -> None:
        for opened in self._open.values():
            opened.file.close()
        self._open.clear()

    def _lines(self, path: Path) -> list[bytes]:
        opened = self._opened(path)
        if opened is None:
            return []
        lines = opened.lines()
        if not lines and not opened.is_still(path):  # rotated away, and read to its end
            opened.file.close()
            del self._open[path]
        return lines

    def _opened(self, path: Path) -> _Open | None:
        if path not in self._open:
            try:
                self._open[path] = _Open(path.open("rb"))
            except OSError:
                return None  # it does not exist yet, or no longer
        return self._open[path]
