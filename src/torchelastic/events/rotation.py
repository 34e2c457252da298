"""The files of a log: read, appended to, and rotated when full. The older part is condensed
into the new one: only the progress of workers, second by second, is dropped.

    events.jsonl      the current part
    events.jsonl.0    a full part, only while it is being moved into the older part
    events.jsonl.1    the older part
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

#: The beginnings of lines that are dropped first.
_FREQUENT = tuple(
    b'{"v":1,"type":"%s"' % one for one in (b"progress", b"checkpoint-stored", b"weights-hashed")
)
#: Two parts whose last bytes are equal end with the same lines, since lines have times.
_END = 4096


# --- readers -------------------------------------------------------------------------------------


def _parts(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of all parts a log may have, the oldest first."""
    return _older(path), _aside(path), path


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".0")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[list[BinaryIO]]:
    """Open the parts of a log, the oldest first. Even during a rotation, no line is missed or in
    two parts."""
    with contextlib.ExitStack() as stack:
        files: list[BinaryIO] = []
        # Newest first, against the direction in which lines move: a moved line is in the next part.
        for part in reversed(_parts(path)):
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(part.open("rb"))
                if files and _is_end_of(files[-1], file):
                    files.pop()  # it has become this one, or a part of it
                files.append(file)
        yield files[::-1]


def length(path: Path) -> int:
    """Return the bytes of all parts of a log."""
    with opened(path) as files:
        return sum(map(_size, files))


def _is_end_of(newer: BinaryIO, older: BinaryIO) -> bool:
    """Return True if the older part ends with all of the newer one."""
    size, whole = _size(newer), _size(older)
    if not 0 < size <= whole:
        return False
    most = min(_END, size)
    end = os.pread(newer.fileno(), most, size - most)
    return end == os.pread(older.fileno(), most, whole - most)


def _size(file: BinaryIO) -> int:
    """Return the size; 0 if it is not a regular file."""
    facts = os.fstat(file.fileno())
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


# --- writers -------------------------------------------------------------------------------------


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


class Rotation:
    """Rotates a log in the background, since copying some megabytes may take a disk long.

    Until that is done, a log that is full again keeps growing.
    """

    def __init__(self, path: Path, kept_bytes: int) -> None:
        self._path, self._kept_bytes = path, kept_bytes
        self._thread: threading.Thread | None = None

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Start a new log; the current one must not be open for writing."""
        _set_aside(self._path)
        if not _aside(self._path).exists():
            return
        thread = threading.Thread(target=self._work, name="torchelastic-rotation", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads: the next rotation tries again
            log.debug("%s is not merged into the older log yet: %s", _aside(self._path), error)
        else:
            self._thread = thread

    def wait(self, patience: float) -> None:
        """Wait at most `patience` seconds. A rotation that is not done then is done next time."""
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        try:
            _condense(self._path, self._kept_bytes)
        except OSError as error:
            log.warning("%s cannot be rotated (%s).", _aside(self._path), error)


def rotate(path: Path, kept_bytes: int) -> None:
    """Make the log at `path` the older part, keeping `kept_bytes` of the previous older part."""
    _condense(path, kept_bytes)
    _set_aside(path)
    _condense(path, kept_bytes)


def _set_aside(path: Path) -> None:
    """Move the full log aside, unless one moved before is still there: its agent was killed."""
    if path.is_file() and not _aside(path).exists():  # never a device: it may be /dev/null
        os.replace(path, _aside(path))


def _condense(path: Path, kept_bytes: int) -> None:
    """Make the log set aside the older part, keeping `kept_bytes` of the previous one."""
    full, older = _aside(path), _older(path)
    if not full.exists():
        return
    try:
        _put_behind(older, full, kept_bytes)
    except OSError as error:
        log.warning("%s is dropped: the disk is full or failing (%s).", older, error)
        os.replace(full, older)


def lasting(lines: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Yield the lines worth keeping, the first ones up to `most` bytes."""
    for line in lines:
        if not line.startswith(_FREQUENT) and line.endswith(b"\n"):
            most -= len(line)
            if most < 0:
                return
            yield line


def _put_behind(older: Path, full: Path, kept_bytes: int) -> None:
    """Write the lasting lines of the older part and the full part as the new older part."""
    if not older.exists():
        os.replace(full, older)
        return
    made = older.with_name(older.name + ".new")
    try:
        with made.open("wb") as both:
            with older.open("rb") as lines:
                both.writelines(lasting(lines, kept_bytes))
            with full.open("rb") as newer:
                shutil.copyfileobj(newer, both, 1 << 20)
        os.replace(made, older)
    except OSError:
        made.unlink(missing_ok=True)
        raise
    full.unlink()  # a reader that comes before this sees lines twice: `opened` handles it
