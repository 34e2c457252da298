"""The file that has the whole job's story: lines of all agents, written by the leader.

Bounded: when it is full it becomes the older part, and of what was the older part all that matters
is kept at the beginning of it. What goes is how far workers had got, second by second.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchelastic.events.appended import AppendedFile

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024 * 1024
#: How much of an older part is kept of what was older still.
KEPT_BYTES = MAX_BYTES // 4
#: How a line begins that is the first to go.
_PASSING = (b'{"v":1,"type":"progress"',)


def lasting(lines: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The lines worth keeping when there is no room for all, the first ones up to so many bytes."""
    for line in lines:
        if not line.startswith(_PASSING) and line.endswith(b"\n"):
            most -= len(line)
            if most < 0:
                return
            yield line


class GatheredLog:
    """Used by one thread at a time. A full disk costs lines, never the job."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.path = path
        #: Writes that did not go through.
        self.dropped = 0
        self._max_bytes, self._kept_bytes = max_bytes, kept_bytes
        self._file = AppendedFile(path)

    def write(self, lines: bytes) -> None:
        """Append whole lines."""
        try:
            self._file.append(lines)
            if self._file.size > self._max_bytes:
                self._rotate()
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning(
                    "Gathered events are lost: %s cannot be written (%s).", self.path, error
                )

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self.close()
        if not self.path.is_file():
            return  # never rename a device
        older = self.path.with_name(self.path.name + ".1")
        try:
            self._condense(older)
        except OSError as error:
            log.warning("%s is given up for want of room (%s).", older, error)
            os.replace(self.path, older)

    def _condense(self, older: Path) -> None:
        """Put what lasts of the older part before this one, and have both as the older part."""
        made = self.path.with_name(self.path.name + ".new")
        try:
            with made.open("wb") as both:
                if older.exists():
                    with older.open("rb") as lines:
                        both.writelines(lasting(lines, self._kept_bytes))
                with self.path.open("rb") as newer:
                    shutil.copyfileobj(newer, both, 1 << 20)
            os.replace(made, older)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        # A reader that comes between the two finds lines twice, and knows them for the same.
        self.path.unlink()
