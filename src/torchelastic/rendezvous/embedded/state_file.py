"""The file in which a store keeps what it must not forget: written whole now and then, else at its
end. `journal` says what is in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.embedded import journal
from torchelastic.rendezvous.embedded.journal import Entry

#: Bytes of changes after which the file is written whole again, and how many times its size then.
ENOUGH, TIMES = 1024 * 1024, 4


class StateFile:
    """One open state file; nobody else has it open."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        #: Bytes it had when it was written whole, and now.
        self._whole = self._size = 0

    def read(self) -> list[Entry]:
        """What the file has; nothing if there is none. Takes it for this process alone."""
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
        """Not where another process has just written the file whole, and let go of the old one."""
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
        """Write the file whole: there is the old one or the new one, whatever happens."""
        lines = [journal.heading(), *map(journal.line, entries)]
        temporary = f"{self.path}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            # Leases' tokens are in it: who has them could pass for a node.
            descriptor = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise ConfigError(self._unusable(error)) from None
        try:
            self._lock(descriptor)  # before it has the name by which others find it
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
        """Write one change; what is `lasting` survives the machine, the rest this process."""
        line = journal.line(entry)
        _write(self._descriptor, line)
        self._size += len(line)
        if lasting:
            os.fdatasync(self._descriptor)

    @property
    def is_long(self) -> bool:
        """Whether it is time to write it whole again."""
        return self._size - self._whole > max(ENOUGH, TIMES * self._whole)

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
    """All of it: a disk that is nearly full takes a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: str) -> None:
    """A new name is safe only when its directory is."""
    directory = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
