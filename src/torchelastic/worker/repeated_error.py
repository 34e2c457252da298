"""Detect a worker that failed with the same traceback in earlier generations.

Earlier tracebacks are in the error files of the same local rank:
`attempt_<generation>/<local rank>/error.json`.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchelastic.events.failure import SAME
from torchelastic.worker import error_file

#: The most earlier failures to look at.
MOST = 100
#: Numbers that differ between equal failures: ports, pids, addresses.
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def sentence(path: str) -> str:
    """`the same traceback as in generation 3, 4 times now`, of the error file at `path`.

    Empty if the traceback is new, or no earlier one is known.
    """
    own = error_file.read(path)
    attempt, local_rank = Path(path).parent.parent, Path(path).parent.name
    generation = _generation(attempt)
    if own is None or not own.traceback or generation is None:
        return ""
    first, times = generation, 1
    for earlier in _before(attempt.parent, generation)[:MOST]:
        said = error_file.read(
            str(attempt.parent / f"attempt_{earlier}" / local_rank / "error.json")
        )
        if said is None:
            continue  # it was stopped there, because of another one
        if _essence(said.traceback) != _essence(own.traceback):
            break
        first, times = earlier, times + 1
    return f"{SAME} {first}, {times} times now" if times > 1 else ""


def _generation(attempt: Path) -> int | None:
    word, _, number = attempt.name.partition("_")
    return int(number) if word == "attempt" and number.isdecimal() else None


def _before(run_dir: Path, generation: int) -> list[int]:
    """Generations that have a directory, the latest first."""
    known = (_generation(path) for path in run_dir.glob("attempt_*"))
    return sorted((one for one in known if one is not None and one < generation), reverse=True)


def _essence(traceback: str) -> list[str]:
    """Lines of code count with their numbers; in all others, numbers do not count.

    >>> _essence('  File "a.py", line 3\\nOSError: port 17')
    ['  File "a.py", line 3', 'OSError: port #']
    """
    lines = traceback.splitlines()
    return [line if line.startswith("  File ") else _NUMBER.sub("#", line) for line in lines]
