"""The versions of torch that this release is run on, and what to say about any other."""

from __future__ import annotations

import re

#: The oldest, the one of most test runs, the newest; `pyproject.toml` says the same.
RUN = ((2, 9), (2, 13), (2, 15))


def in_words(versions: tuple[tuple[int, int], ...] = RUN) -> str:
    """`2.9, 2.13 and 2.15`."""
    *others, last = (".".join(map(str, one)) for one in versions)
    return f"{', '.join(others)} and {last}" if others else last


def too_old(version: str) -> str:
    """The error for a torch that is older than the oldest; empty for all others."""
    found = _number(version)
    if found is None or found >= RUN[0]:
        return ""
    return f"torch is {version}; torchelastic needs {in_words(RUN[:1])} or later: upgrade torch."


def too_new(version: str) -> str:
    """The warning for a torch that is newer than any that was run; empty for all others."""
    found = _number(version)
    if found is None or found <= RUN[-1]:
        return ""
    return (
        f"torch {version} is newer than any that torchelastic was tested with ({in_words()}). "
        f"If training fails, try torch {in_words(RUN[-1:])} and report the difference."
    )


def _number(version: str) -> tuple[int, int] | None:
    """Major and minor; None for what does not look like a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
