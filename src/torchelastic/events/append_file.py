"""Append whole lines to a file, even if the disk fills up or the file is removed."""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """A file opened at the first write. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Known bytes in the file.
        self.size = 0
        self._fd: int | None = None
        self._torn = False

    def append(self, lines: bytes) -> None:
        """Append with one `write`: readers see whole lines, even with several writers.

        Raises `OSError` if not all of them were written.
        """
        fd = self._open()
        # A line that a full disk cut short must not run into the next one.
        data = b"\n" + lines if self._torn else lines
        written = os.write(fd, data)
        self.size += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{written} of {len(data)} bytes were written")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is not None and not self._is_in_place(self._fd):
            self.close()  # it was removed or moved away: further lines would be lost
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
            self.size = os.fstat(self._fd).st_size
        return self._fd

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False
