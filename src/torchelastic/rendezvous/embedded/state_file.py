"""The file in which a store or a voter keeps its state: rewritten from time to time, appended
otherwise. `journal` describes its content."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.embedded import journal
from torchelastic.rendezvous.embedded.journal import Entry

#: The file is rewritten when its changes exceed this many bytes, and this many times its size after
#: the last rewrite.
REWRITE_BYTES, REWRITE_FACTOR = 1024 * 1024, 4


class StateFile:
    """One open state file, locked by this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        #: Its size in bytes after the last rewrite, and now.
        self._whole = self._size = 0

    def read(self) -> list[Entry]:
        """Lock the file for this process and return its entries; none if there is no file."""
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(self._unusable(error)) from None
        self._lock(self._descriptor)
        if not self._is_current():
            raise ConfigError(self._in_use())
        with open(self._descriptor, "rb", closefd=False) as file:
            return journal.parse(file.read(), self.path)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(self._in_use()) from None

    def _is_current(self) -> bool:
        """Return whether this is still the file at the path: another process may have rewritten
        it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _in_use(self) -> str:
        return (
            f"The state file {self.path} is in use by another process: give every server a "
            "different file."
        )

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Rewrite the file: after a crash there is either the old or the new one."""
        lines = [journal.heading(), *map(journal.line, entries)]
        temporary = f"{self.path}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            # It has the leases' tokens, with which another process could pass for a node.
            descriptor = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise ConfigError(self._unusable(error)) from None
        try:
            self._lock(descriptor)  # before others can find it by its name
            _write(descriptor, b"".join(lines))
            os.fsync(descriptor)
            os.rename(temporary, self.path)
            sync_directory(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor = descriptor
        self._whole = self._size = sum(map(len, lines))

    def append(self, entry: Entry, *, lasting: bool) -> None:
        """Append one change; a `lasting` one survives the machine, others survive this process."""
        line = journal.line(entry)
        _write(self._descriptor, line)
        self._size += len(line)
        if lasting:
            os.fdatasync(self._descriptor)

    @property
    def is_long(self) -> bool:
        """Return whether it is time to rewrite the file."""
        return self._size - self._whole > max(REWRITE_BYTES, REWRITE_FACTOR * self._whole)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _unusable(self, error: OSError) -> str:
        return (
            f"The state file {self.path} cannot be used ({error.strerror}): name another one in "
            "--state-file."
        )


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes: a nearly full disk accepts only some at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: str) -> None:
    """Sync the directory: only then is a new file name on disk."""
    directory = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
