"""What becomes of a log that is full: it becomes the older part, of which what matters lasts.

Of what was the older part before, all that matters is kept at the beginning of the new one. What
goes is how far workers had got, second by second.

    events.jsonl      is written
    events.jsonl.0    is full, and was set aside: only while it is being put behind what is older
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

#: How lines begin that are the first to go.
_PASSING = (b'{"v":1,"type":"progress"', b'{"v":1,"type":"checkpoint-stored"')
#: Bytes by whose sameness two parts are known to end with the same lines: a line has its time.
_END = 4096


# --- who reads -----------------------------------------------------------------------------------


def _parts(path: Path) -> tuple[Path, Path, Path]:
    """Where the parts of a log are, those that it has, the oldest first."""
    return _older(path), _aside(path), path


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".0")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[list[BinaryIO]]:
    """The parts of a log, the oldest first, whatever moves meanwhile: no line is missed, and none
    is in two of them."""
    with contextlib.ExitStack() as stack:
        files: list[BinaryIO] = []
        # The newest first, against the way that lines take: what moves on is found in the next.
        for part in reversed(_parts(path)):
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(part.open("rb"))
                if files and _is_end_of(files[-1], file):
                    files.pop()  # it has become this one, or a part of it
                files.append(file)
        yield files[::-1]


def length(path: Path) -> int:
    """The bytes of all parts of a log."""
    with opened(path) as files:
        return sum(map(_size, files))


def _is_end_of(newer: BinaryIO, older: BinaryIO) -> bool:
    """Whether a part ends with all that another one has."""
    size, whole = _size(newer), _size(older)
    if not 0 < size <= whole:
        return False
    most = min(_END, size)
    end = os.pread(newer.fileno(), most, size - most)
    return end == os.pread(older.fileno(), most, whole - most)


def _size(file: BinaryIO) -> int:
    """0 for what is no file."""
    facts = os.fstat(file.fileno())
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


# --- who writes ----------------------------------------------------------------------------------


class Rotation:
    """Rotates a log behind the back of who writes it: a disk may take long to copy some megabytes.

    Until that is done a log that is full again grows on.
    """

    def __init__(self, path: Path, kept_bytes: int) -> None:
        self._path, self._kept_bytes = path, kept_bytes
        self._thread: threading.Thread | None = None

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Have a new log written from now on; nobody may have this one open for writing."""
        _set_aside(self._path)
        if not _aside(self._path).exists():
            return
        thread = threading.Thread(target=self._work, name="torchelastic-rotation", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many: the log waits for a better time
            log.debug("%s is not put behind what is older yet: %s", _aside(self._path), error)
        else:
            self._thread = thread

    def wait(self, patience: float) -> None:
        """Give it so many seconds to be done. What is not done then is done the next time."""
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        try:
            _condense(self._path, self._kept_bytes)
        except OSError as error:
            log.warning("%s cannot be made the older part (%s).", _aside(self._path), error)


def rotate(path: Path, kept_bytes: int) -> None:
    """Make the log at `path` the older part, with so many bytes of what was older still."""
    _condense(path, kept_bytes)
    _set_aside(path)
    _condense(path, kept_bytes)


def _set_aside(path: Path) -> None:
    """Make room for a new log, unless one that was set aside before is still there: of an agent
    that was killed then."""
    if path.is_file() and not _aside(path).exists():  # never a device: it may be /dev/null
        os.replace(path, _aside(path))


def _condense(path: Path, kept_bytes: int) -> None:
    """Make what was set aside the older part, with so many bytes of what was older still."""
    full, older = _aside(path), _older(path)
    if not full.exists():
        return
    try:
        _put_behind(older, full, kept_bytes)
    except OSError as error:
        log.warning("%s is given up for want of room (%s).", older, error)
        os.replace(full, older)


def lasting(lines: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The lines worth keeping when there is no room for all, the first ones up to so many bytes."""
    for line in lines:
        if not line.startswith(_PASSING) and line.endswith(b"\n"):
            most -= len(line)
            if most < 0:
                return
            yield line


def _put_behind(older: Path, full: Path, kept_bytes: int) -> None:
    """Put what lasts of the older part before the full one, and have both as the older part."""
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
    full.unlink()  # a reader that comes before this finds lines twice, and knows: see `opened`
