"""torch's own timers, for scripts that use those: requests by a named pipe.

As under torchrun, with TORCHELASTIC_ENABLE_FILE_TIMER=1: workers find the pipe's path in
TORCHELASTIC_TIMER_FILE and give it to torch's `FileTimerClient`. What expires is treated as ours
is, and ends the worker alone: torchrun ends the agent as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from torchelastic.errors import ConfigError
from torchelastic.timer.table import Timer, printable

logger = logging.getLogger(__name__)

#: What a pipe takes in one piece, so no line is longer; and how many are read at a time.
_LINE, _READ = 4096, 1 << 16
#: Timers at once, of all workers: beyond that somebody makes up scopes.
MOST = 10_000


class Asked(NamedTuple):
    """A request, by the clock of the wall as torch has it."""

    pid: int
    scope: str
    expires_at: float
    #: 0: the worker is not to be ended.
    signum: int


def parse(line: bytes) -> Asked | None:
    """A line of torch's client; None for anything else."""
    try:
        data = json.loads(line)
        pid, signum = data["pid"], data["signal"]
        asked = Asked(int(pid), str(data["scope_id"]), float(data["expiration_time"]), int(signum))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return asked


class FileTimers:
    """The timers that workers have asked for by the pipe."""

    ENABLED, VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._timers: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        try:
            path.unlink(missing_ok=True)  # a killed agent may have left it
            os.mkfifo(path, 0o600)
            # For writing, too: a pipe without a writer would be at its end all the time.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{self.VARIABLE}={path} cannot be a pipe ({error.strerror}): name another file."
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
            self._take(os.read(self._pipe, _READ), time.time(), time.monotonic())
            on_request()

        asyncio.get_running_loop().add_reader(self._pipe, hear)

    def of(self, pid: int) -> list[Timer]:
        """The timers of a worker."""
        return [timer for (owner, _), timer in self._timers.items() if owner == pid]

    def forget(self, pid: int) -> None:
        """This worker is being ended."""
        for key in [key for key in self._timers if key[0] == pid]:
            del self._timers[key]

    def keep(self, pids: Collection[int]) -> None:
        """Forget the timers of all others: they have ended, or are no workers."""
        for key in [key for key in self._timers if key[0] not in pids]:
            del self._timers[key]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        self.path.unlink(missing_ok=True)

    def _take(self, data: bytes, wall: float, now: float) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= _LINE else b""
        for line in lines:
            asked = parse(line)
            if asked is None:
                logger.debug("%s has something unreadable", self.path)
            else:
                self._note(asked, wall, now)

    def _note(self, asked: Asked, wall: float, now: float) -> None:
        """What torch says by the wall clock counts by ours from here on."""
        key, after = (asked.pid, asked.scope), max(0.0, asked.expires_at - wall)
        if asked.expires_at < 0 or asked.signum <= 0:
            self._timers.pop(key, None)
        elif len(self._timers) < MOST or key in self._timers:
            self._timers[key] = Timer(-1, now + after, round(after, 3), printable(asked.scope))
