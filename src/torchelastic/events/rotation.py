"""What becomes of a log that is full: it becomes the older part, of which what matters lasts.

Of what was the older part before, all that matters is kept at the beginning of the new one. What
goes is how far workers had got, second by second.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

#: How lines begin that are the first to go.
_PASSING = (b'{"v":1,"type":"progress"', b'{"v":1,"type":"checkpoint-stored"')


def older_part(path: Path) -> Path:
    """Where the older part of a log is, if it has one."""
    return path.with_name(path.name + ".1")


def rotate(path: Path, kept_bytes: int) -> None:
    """Make the log at `path` the older part, with so many bytes of what was older still."""
    if not path.is_file():
        return  # never rename a device: the path may be /dev/null
    older = older_part(path)
    try:
        _condense(path, older, kept_bytes)
    except OSError as error:
        log.warning("%s is given up for want of room (%s).", older, error)
        os.replace(path, older)


def lasting(lines: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The lines worth keeping when there is no room for all, the first ones up to so many bytes."""
    for line in lines:
        if not line.startswith(_PASSING) and line.endswith(b"\n"):
            most -= len(line)
            if most < 0:
                return
            yield line


def _condense(path: Path, older: Path, kept_bytes: int) -> None:
    """Put what lasts of the older part before the log, and have both as the older part."""
    if not older.exists():
        os.replace(path, older)
        return
    made = path.with_name(path.name + ".new")
    try:
        with made.open("wb") as both:
            with older.open("rb") as lines:
                both.writelines(lasting(lines, kept_bytes))
            with path.open("rb") as newer:
                shutil.copyfileobj(newer, both, 1 << 20)
        os.replace(made, older)
    except OSError:
        made.unlink(missing_ok=True)
        raise
    # A reader that comes between the two finds lines twice, and knows them for the same.
    path.unlink()
