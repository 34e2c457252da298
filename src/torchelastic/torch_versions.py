"""The versions of torch that this release is tested with, and messages about other versions."""

from __future__ import annotations

import re

#: The oldest, the one that most tests use, and the newest; keep in step with `pyproject.toml`.
RUN = ((2, 9), (2, 13), (2, 15))


def in_words(versions: tuple[tuple[int, int], ...] = RUN) -> str:
    """Return the versions as `2.9, 2.13 and 2.15`."""
    *others, last = (".".join(map(str, one)) for one in versions)
    return f"{', '.join(others)} and {last}" if others else last


def too_old(version: str) -> str:
    """Return the error for a torch older than the oldest supported one, else an empty text."""
    found = _number(version)
    if found is None or found >= RUN[0]:
        return ""
    return f"torch is {version}; torchelastic needs {in_words(RUN[:1])} or later: upgrade torch."


def too_new(version: str) -> str:
    """Return the warning for a torch newer than the newest tested one, else an empty text."""
    found = _number(version)
    if found is None or found <= RUN[-1]:
        return ""
    return (
        f"torch {version} is newer than the versions torchelastic was tested with ({in_words()}). "
        f"If training fails, try torch {in_words(RUN[-1:])} and report the difference."
    )


def _number(version: str) -> tuple[int, int] | None:
    """Return (major, minor), or None if the text is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
