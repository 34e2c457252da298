"""`error.json`: the error of a failed worker, in the format of torch's `@record`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A frame of a traceback, or the location of a `SyntaxError`; in an exception group after bars.
_FRAME = re.compile(r'^[ |+]*File "([^"]+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
#: Files that are not the user's: installed packages, the standard library, built-in code.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d[\d.]*/|^<")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BEGINS = "Traceback (most recent call last):"


@dataclass(frozen=True)
class ErrorRecord:
    """The content of an error file."""

    #: `RuntimeError: boom`.
    message: str
    traceback: str = ""
    #: Unix seconds; 0 if unknown.
    timestamp: int = 0
    #: `user_frame` of the traceback.
    place: str = ""


def user_frame(traceback: str) -> str:
    """`train.py:37 in step`: the innermost frame that is the user's code, in the exception that
    ended the program; the innermost of all where none is. Empty without any.

    >>> user_frame('''Traceback (most recent call last):
    ...   File "/job/train.py", line 37, in step
    ...   File "/env/lib/python3.12/site-packages/torch/nn/functional.py", line 9, in linear
    ... RuntimeError: boom''')
    'train.py:37 in step'
    """
    frames = _FRAME.findall(traceback.rpartition(_BEGINS)[2]) or _FRAME.findall(traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame[0]) and _OURS not in frame[0]]
    for file, line, function in (own or frames)[-1:]:
        return f"{os.path.basename(file)}:{line}" + (f" in {function}" if function else "")
    return ""


def write(path: str, message: str, traceback: str) -> bool:
    """Write an error file atomically; False if there already is one, which is kept.

    The first writer is nearest to the cause: `@record`, inside the program, comes before us.
    """
    if os.path.exists(path):
        return False
    record = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": traceback, "timestamp": str(int(time.time()))},
        }
    }
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(draft, path)
    return True


def read(path: str) -> ErrorRecord | None:
    """Read an error file; None if there is none or it is unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse(json.load(file))
    except (OSError, ValueError, RecursionError):
        return None


def heard(message: Mapping[str, Any]) -> ErrorRecord:
    """Return the record in a failing worker's message (`bootstrap.report`)."""
    said, where, place = (str(message.get(name, "")) for name in ("message", "traceback", "place"))
    return ErrorRecord(said, where, place=place)


def parse(data: Any) -> ErrorRecord | None:
    """Parse the JSON of an error file, however incomplete.

    >>> parse({"message": "boom", "timestamp": 10})
    ErrorRecord(message='boom', traceback='', timestamp=10)
    """
    said = data.get("message") if isinstance(data, dict) else None
    if isinstance(said, str):
        return ErrorRecord(said, timestamp=_seconds(data.get("timestamp")))
    if not isinstance(said, dict) or not isinstance(said.get("message"), str):
        return None
    extra = said.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    told = extra.get("py_callstack")
    traceback = told if isinstance(told, str) else ""
    at = _seconds(extra.get("timestamp", data.get("timestamp")))
    return ErrorRecord(said["message"], traceback, at, user_frame(traceback))


def _seconds(timestamp: Any) -> int:
    """Parse Unix seconds; 0 for anything else."""
    return int(timestamp) if str(timestamp).isdecimal() else 0
