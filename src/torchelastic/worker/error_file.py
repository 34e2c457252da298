"""`error.json`: how a failing worker tells what went wrong, as torch's `@record` writes it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ErrorRecord:
    """What an error file says."""

    #: `RuntimeError: boom`.
    message: str
    traceback: str = ""
    #: Unix seconds, 0 if the file does not say.
    timestamp: int = 0


def write(path: str, message: str, traceback: str) -> bool:
    """Write an error file, whole or not at all; False if there is one already, which is kept.

    The first to tell is nearest to the cause: `@record`, inside the program, comes before us.
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
    """What an error file says; None if there is none or it says nothing that we understand."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse(json.load(file))
    except (OSError, ValueError, RecursionError):
        return None


def parse(data: Any) -> ErrorRecord | None:
    """The record in the JSON of an error file, however incomplete.

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
    traceback = extra.get("py_callstack")
    return ErrorRecord(
        said["message"],
        traceback if isinstance(traceback, str) else "",
        _seconds(extra.get("timestamp", data.get("timestamp"))),
    )


def _seconds(timestamp: Any) -> int:
    """0 for anything that is no time."""
    return int(timestamp) if str(timestamp).isdecimal() else 0
