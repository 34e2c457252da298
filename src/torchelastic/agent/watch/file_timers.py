"""Support for torch's own timers: scripts send requests through a named pipe.

As under torchrun, with TORCHELASTIC_ENABLE_FILE_TIMER=1: workers find the pipe's path in
TORCHELASTIC_TIMER_FILE and give it to torch's `FileTimerClient`. An expired timer is treated as
ours are and ends only the worker; torchrun ends the agent as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from torchelastic.errors import ConfigError
from torchelastic.system.text import printable
from torchelastic.timer.timer_table import Timer

logger = logging.getLogger(__name__)

#: Bytes read at a time.
_READ_BYTES = 1 << 16
#: The longest line: a pipe takes that many bytes atomically.
LINE = select.PIPE_BUF
#: Timers of all workers at once; more are ignored.
MOST_TIMERS = 10_000


class PipeRequest(NamedTuple):
    """What torch's `FileTimerClient` asks for: a timer, or its release."""

    pid: int
    scope: str
    #: `time.time()`; negative to release the timer.
    expiration_time: float
    #: 0: do not end the process.
    signal: int


def parse(line: bytes) -> PipeRequest | None:
    """Parse the request in a line; None for anything else."""
    try:
        data = json.loads(line)
        pid, scope = int(data["pid"]), str(data["scope_id"])
        return PipeRequest(pid, scope, float(data["expiration_time"]), int(data["signal"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class FileTimers:
    """The timers that workers have requested through the pipe."""

    ENABLED, VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._timers: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        try:
            self._pipe = _open_pipe(path)
        except OSError as error:
            raise ConfigError(
                f"{self.VARIABLE}={path} cannot be used as a named pipe ({error.strerror}): "
                "choose another path."
            ) from error

    @classmethod
    def wanted(cls, environ: Mapping[str, str], directory: Path) -> FileTimers | None:
        """None unless the environment asks for it, as torchrun has it."""
        if environ.get(cls.ENABLED) != "1":
            return None
        return cls(Path(environ.get(cls.VARIABLE) or directory / "timers"))

    def listen(self, on_request: Callable[[], None]) -> None:
        """Take requests from now on."""

        def hear() -> None:
            self._take(os.read(self._pipe, _READ_BYTES), time.time(), time.monotonic())
            on_request()

        asyncio.get_running_loop().add_reader(self._pipe, hear)

    def of(self, pid: int) -> list[Timer]:
        """The timers of a worker."""
        return [timer for (owner, _), timer in self._timers.items() if owner == pid]

    def forget(self, pid: int) -> None:
        """Drop the timers of a worker that is being ended."""
        for key in [key for key in self._timers if key[0] == pid]:
            del self._timers[key]

    def keep(self, pids: Collection[int]) -> None:
        """Drop the timers of all other processes: they ended, or are not workers."""
        for key in [key for key in self._timers if key[0] not in pids]:
            del self._timers[key]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        self.path.unlink(missing_ok=True)

    def _take(self, data: bytes, wall: float, now: float) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= LINE else b""
        for line in lines:
            asked = parse(line)
            if asked is None:
                logger.debug("%s: ignored an unreadable request", self.path)
            else:
                self._note(asked, wall, now)

    def _note(self, asked: PipeRequest, wall: float, now: float) -> None:
        """Set or cancel a timer; torch's wall-clock time becomes monotonic time here."""
        key = (asked.pid, asked.scope)
        after = max(0.0, asked.expiration_time - wall)
        if asked.expiration_time < 0 or asked.signal <= 0:
            self._timers.pop(key, None)
        elif len(self._timers) < MOST_TIMERS or key in self._timers:
            self._timers[key] = Timer(-1, now + after, round(after, 3), printable(asked.scope))


def _open_pipe(path: Path) -> int:
    """Create the pipe and open it for reading; replaces the leftover of a killed process."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    # Also for writing: a pipe without a writer is always at its end.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
