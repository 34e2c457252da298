"""A file that whole lines are appended to, whatever becomes of the disk and of the file."""

from __future__ import annotations

import os
from pathlib import Path


class AppendedFile:
    """Opened at the first write. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Bytes in the file, as far as is known.
        self.size = 0
        self._fd: int | None = None
        self._torn = False

    def append(self, lines: bytes) -> None:
        """One `write`: a reader sees whole lines, whoever else appends to the file.

        Raises `OSError` when they are not in the file, or not all of them.
        """
        fd = self._open()
        # The rest of a line that a full disk cut short must not be glued to the next one.
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
            self.close()  # somebody has removed it, or moved it away: nobody would find the rest
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
