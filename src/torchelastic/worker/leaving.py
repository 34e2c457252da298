"""`torchelastic.leaving()`: whether this worker's node is about to leave the job.

The agent writes a file when it is asked to leave, by a signal or by a preemption notice. Its path
is in the environment, so every process that a worker starts can read it, too.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


# --- a scheduler's signals -----------------------------------------------------------------------

# Slurm sends SIGTERM to every process of a step, workers included. A worker that can save its state
# before its node leaves must not die by it: the agent has the signal, too, and tells the worker
# what to do.

#: Names of the signals that workers get, too; set by the agent.
SHARED_SIGNALS = "TORCHELASTIC_SHARED_SIGNALS"


def ignore_while(is_told: Callable[[], bool]) -> dict[signal.Signals, object]:
    """Ignore the shared signals while `is_told` says that the agent tells this worker what to do.

    Returns the handlers before; a signal that the script handles itself is left to it, and so are
    all of them outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def handle(signum: int, frame: object) -> None:
        if not is_told():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    names = [name for name in env.get(SHARED_SIGNALS).split(",") if name]
    free = [
        number
        for name in names
        if signal.getsignal(number := signal.Signals[name]) is signal.SIG_DFL
    ]
    for number in free:
        signal.signal(number, handle)
    return dict.fromkeys(free, signal.SIG_DFL)


@contextmanager
def left_to_agent(is_told: Callable[[], bool]) -> Iterator[None]:
    """`ignore_while` in this block."""
    before = ignore_while(is_told)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
