"""Timers over a named pipe, like torch's: for processes that share nothing but a path.

A request is one line of JSON with a wall clock time. Under `torchelastic run` the agent reads the
pipe in `TORCHELASTIC_TIMER_FILE`, and no server is needed.
"""

from __future__ import annotations

import json
import os
import select
import signal as signals
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torchelastic.timer.queue_timers import LocalTimerServer
from torchelastic.timer.timer_requests import RELEASE, RequestQueue, TimerClient, TimerRequest
from torchelastic.timer.timer_server import TimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

#: The longest line (a pipe takes that many bytes atomically), and the bytes per read.
LINE, _READ = select.PIPE_BUF, 1 << 16


class FileTimerRequest(TimerRequest):
    """A request to acquire a timer, or to release it if `expiration_time` is negative."""

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        """`signal` kills the worker; 0: do not kill it."""
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


def parse(line: bytes) -> FileTimerRequest | None:
    """Parse the request in a line; None for anything else."""
    try:
        data = json.loads(line)
        pid, scope = int(data["pid"]), str(data["scope_id"])
        return FileTimerRequest(pid, scope, float(data["expiration_time"]), int(data["signal"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def open_pipe(path: Path) -> int:
    """Create the pipe and open it for reading; replaces the leftover of a killed process."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    # Also for writing: a pipe without a writer is always at its end.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class FileTimerClient(TimerClient):
    """Writes this process's timers to the pipe of a server."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        """`signal` kills this process when a timer expires; 0: do not kill it."""
        self._path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Acquire a timer: from `expiration_time` on (`time.time()`) this process may be killed."""
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, RELEASE))

    def start(self, scope_id: str, after: float) -> Callable[[], None]:
        self.acquire(scope_id, time.time() + after)
        return partial(self.release, scope_id)

    def _send(self, request: FileTimerRequest) -> None:
        line = f"{request.to_json()}\n".encode()
        if len(line) > LINE:
            raise RuntimeError(
                f"The scope of a timer is too long ({len(line)} bytes): make it shorter."
            )
        try:
            pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise BrokenPipeError(
                f"No timer server reads {self._path} ({error.strerror}): start a FileTimerServer "
                "there first."
            ) from error
        with open(pipe, "wb", buffering=0) as file:
            os.set_blocking(pipe, True)  # a full pipe is read soon
            file.write(line)


class _Pipe(RequestQueue):
    """Requests from a pipe, with their times converted to the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._pipe = open_pipe(path)
        self._rest = b""

    def size(self) -> int:
        return 0  # unknown; the next `get` returns them

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return []
        *lines, rest = (self._rest + os.read(self._pipe, _READ)).split(b"\n")
        self._rest = rest if len(rest) <= LINE else b""
        found = [request for line in lines if (request := parse(line)) is not None]
        ahead = time.monotonic() - time.time()
        for request in found:
            if request.expiration_time >= 0:
                request.expiration_time = max(0.0, request.expiration_time + ahead)
        return list(found)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: there is enough to wake for
            os.write(self._pipe, b"\n")

    def close(self) -> None:
        os.close(self._pipe)


class FileTimerServer(LocalTimerServer):
    """Kills processes of this machine whose timers, written to its pipe, have expired."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        """`log_event` is called for starts, stops, expired timers and killed processes."""
        self._path = Path(file_path)
        self._pipe = _Pipe(self._path)
        TimerServer.__init__(self, self._pipe, max_interval, daemon)
        self._watched = {}
        self._log_event = log_event or (lambda name, request: None)

    def start(self) -> None:
        super().start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        super().stop()
        if self._path.exists():
            self._pipe.close()
            self._path.unlink()
            self._log_event("watchdog stopped", None)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Register one timer per scope; a new one replaces it. Ignores timers without a signal."""
        for request in timer_requests:
            assert isinstance(request, FileTimerRequest)
            self._release(request.worker_id, request.scope_id)
            if request.expiration_time >= 0 and request.signal > 0:
                super().register_timers([request])

    def _reap_worker(self, worker_id: int) -> bool:
        expired = self.get_expired_timers(time.monotonic())[worker_id]
        first = min(expired, key=lambda request: request.expiration_time)
        assert isinstance(first, FileTimerRequest)
        self._log_event("timer expired", first)
        ended = self._send_signal(worker_id, first.signal)
        if ended:
            self._log_event("kill worker process", first)
        return ended
