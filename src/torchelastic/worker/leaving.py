"""`torchelastic.leaving()`: whether this worker's node is about to leave the job.

The agent writes a file when it is asked to leave, by a signal or by a preemption notice. Its path
is in the environment, so every process that a worker starts can read it, too.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from torchelastic import env

VARIABLE = "TORCHELASTIC_LEAVING_FILE"


@dataclass(frozen=True)
class LeaveNotice:
    """Why this node leaves the job, and how long its workers still have."""

    reason: str
    #: Seconds until the workers are killed.
    seconds: float


def leaving() -> LeaveNotice | None:
    """Return why and when this worker's node leaves the job; None while it stays.

    It costs one system call. A script that wants to act on it must survive SIGTERM, which its
    agent sends when the node leaves: `signal.signal(signal.SIGTERM, signal.SIG_IGN)`.
    """
    path = env.get(VARIABLE)
    try:
        text = Path(path).read_text() if path else ""
    except FileNotFoundError:
        return None
    if not text:
        return None
    said = json.loads(text)
    return LeaveNotice(said["reason"], max(said["deadline"] - time.monotonic(), 0.0))


class LeaveFile:
    """The file, as the agent writes it. The first reason and the earliest deadline count: a notice
    of two minutes may be followed by a SIGTERM with 30 seconds."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "leaving.json"
        self.path.unlink(missing_ok=True)  # of an earlier agent of this node
        self._said: tuple[str, float] | None = None

    def announce(self, reason: str, deadline: float) -> None:
        """Write it, whole or not at all; `deadline` is by this machine's monotonic clock."""
        if self._said is not None:
            reason, deadline = self._said[0], min(self._said[1], deadline)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"reason": reason, "deadline": deadline}))
        os.replace(beside, self.path)
        self._said = reason, deadline
