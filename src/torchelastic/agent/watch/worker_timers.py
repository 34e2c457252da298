"""The timers of this node's workers: a worker that does not leave a block in time is killed.

The agent reads every worker's table (`timer/timer_table.py`) every quarter of a second, or when the
next timer expires if that is sooner, and not at all before a worker has its first timer.
When a timer has expired, the worker writes its stacks and is killed, whatever it does then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchelastic.agent.watch.stack_reader import (
    FROZEN,
    NOTHING,
    STACK_BYTES,
    is_busy,
    is_frozen,
    stack_of,
)
from torchelastic.best_effort import observing
from torchelastic.errors import ConfigError
from torchelastic.events.analysis.hangs import tidy
from torchelastic.system import linux
from torchelastic.system.text import printable
from torchelastic.timer.timer_table import MESSAGE, STACKS_AT, Timer, read

if TYPE_CHECKING:
    from torchelastic.agent.watch.hang_watchdog import HangReport
    from torchelastic.agent.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

#: Seconds between two looks, and so the greatest delay for a shorter timer.
LOOK = 0.25
#: Seconds that a worker has to write its stacks, and between two looks at them. After this many
#: looks without a change they are complete, even if the worker is busy.
STACKS_TIMEOUT, LOOK_AGAIN, UNCHANGED_LOOKS = 5.0, 0.02, 25


@dataclass(frozen=True)
class TimedWorker:
    """A worker that has timers."""

    pid: int
    #: Its table.
    descriptor: int
    #: The signal that makes it write its stacks.
    signum: int


class Timers:
    """Watches the workers' timer tables and their requests for torch's timers."""

    def __init__(self) -> None:
        self._watched: dict[int, TimedWorker] = {}
        self._file: FileTimers | None = None
        #: From the first timer on.
        self._some = asyncio.Event()
        #: Reports what all ranks were doing when a timer expired.
        self.report: HangReport | None = None

    # --- tables of workers -----------------------------------------------------------------------

    def handed(
        self, local_rank: int, pid: int | None, message: Mapping[str, Any], descriptor: int
    ) -> None:
        """Take over a worker's timer table."""
        signum: Any = message.get("signal")
        # A signal that is not a real-time one would do something else to the worker.
        may_be_sent = isinstance(signum, int) and signal.SIGRTMIN <= signum <= signal.SIGRTMAX
        known = message.get("type") == MESSAGE and may_be_sent
        if pid is None or not known or not linux.is_memory(descriptor):
            logger.debug("worker %d sent an invalid timer table", local_rank)
            os.close(descriptor)
            return
        self.ended(local_rank)
        self._watched[local_rank] = TimedWorker(pid, descriptor, int(signum))
        self._some.set()

    def take_also(self, file: FileTimers) -> None:
        """Watch torch's timers, too; they are closed with these."""
        self._file = file
        file.listen(self._some.set)

    def ended(self, local_rank: int) -> None:
        """Drop the timers of a worker that has exited."""
        watched = self._watched.pop(local_rank, None)
        if watched is not None:
            os.close(watched.descriptor)

    def close(self) -> None:
        for local_rank in list(self._watched):
            self.ended(local_rank)
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- watching --------------------------------------------------------------------------------

    async def watch(self, workers: WorkerPool) -> None:
        """Watch for as long as the agent runs."""
        while True:
            await self._some.wait()
            now = time.monotonic()
            found = self._look({rank: workers.pid(rank) or 0 for rank in workers.alive})
            late = {rank: timer for rank, timers in found.items() if (timer := first(timers, now))}
            if late and not workers.stopping:
                await asyncio.gather(*(self._end(*each, workers) for each in late.items()))
            await asyncio.sleep(pause(chain.from_iterable(found.values()), now))

    def _look(self, pids: Mapping[int, int]) -> dict[int, list[Timer]]:
        """The timers of each worker, by its local rank."""
        found = {rank: read(seen.descriptor) for rank, seen in self._watched.items()}
        if self._file is not None:
            self._file.keep(pids.values())
            for rank, pid in pids.items():
                found.setdefault(rank, []).extend(self._file.of(pid))
        return found

    async def _end(self, local_rank: int, timer: Timer, workers: WorkerPool) -> None:
        """Read the stacks of a worker whose timer has expired, then kill it."""
        pid, stack = workers.pid(local_rank), NOTHING
        with observing("Reading the stack of a worker whose timer expired"):
            stack = await self._last_stack(local_rank, timer, workers)
        if pid is not None and workers.pid(local_rank) == pid:
            self.ended(local_rank)
            if self._file is not None:
                self._file.forget(pid)
            workers.kill(local_rank, words(timer), stack)

    async def _last_stack(self, local_rank: int, timer: Timer, workers: WorkerPool) -> str:
        """The worker's stack, after the hang report."""
        pid, watched = workers.pid(local_rank), self._watched.get(local_rank)
        if watched is None:
            stack = await self._seen(local_rank, workers)
            stack = stack or await stack_of(pid, workers.helpers) or NOTHING
        else:
            # Its threads run while it reads their frames, which may crash it before we kill it.
            workers.condemn(local_rank, words(timer))
            own = os.dup(watched.descriptor)  # the worker may end meanwhile
            try:
                stack = await _stack(replace(watched, descriptor=own), workers.helpers)
            finally:
                os.close(own)
            if pid is not None and workers.pid(local_rank) == pid:
                workers.condemn(local_rank, words(timer), stack)
        await self._seen(local_rank, workers)
        return stack

    async def _seen(self, local_rank: int, workers: WorkerPool) -> str:
        """Report what all ranks were doing; return the stack of this one."""
        if self.report is None:
            return ""
        found = await self.report.found(workers.generation(local_rank))
        self.report.tell(found)
        rank = workers.rank(local_rank)
        return next((one.stack for one in found.activities if one.rank == rank), "")


def first(timers: Iterable[Timer], now: float) -> Timer | None:
    """The timer that expired first; None if none has."""
    expired = [timer for timer in timers if timer.expires_at <= now]
    return min(expired, key=lambda timer: timer.expires_at, default=None)


def pause(timers: Iterable[Timer], now: float) -> float:
    """Seconds until the next look."""
    ahead = [timer.expires_at - now for timer in timers if timer.expires_at > now]
    return min(LOOK, *ahead) if ahead else LOOK


def words(timer: Timer) -> str:
    """The sentence on the worker's failure."""
    return f"timer '{timer.scope}' expired after {timer.after:g} s"


# --- stacks --------------------------------------------------------------------------------------


async def _stack(watched: TimedWorker, helpers: set[int]) -> str:
    """The stacks of the worker's threads, written by itself or read by py-spy."""
    if is_frozen(watched.pid):
        return await stack_of(watched.pid, helpers) or FROZEN
    written = tidy(await _written_stack(watched))
    return written or await stack_of(watched.pid, helpers) or NOTHING


async def _written_stack(watched: TimedWorker) -> str:
    """Have the worker write its stacks by a signal; the thread that gets it stops there."""
    begin = max(os.fstat(watched.descriptor).st_size, STACKS_AT)
    try:
        os.kill(watched.pid, watched.signum)
    except ProcessLookupError:
        return ""
    size, same, deadline = begin, 0, time.monotonic() + STACKS_TIMEOUT
    while same < UNCHANGED_LOOKS and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_AGAIN)
        before, size = size, os.fstat(watched.descriptor).st_size
        same = same + 1 if size == before > begin else 0
        if same and not is_busy(watched.pid):
            break  # it has stopped after writing, and does not just wait for a CPU
    # The end of a long dump: the main thread is written last.
    begin = max(begin, size - STACK_BYTES)
    return os.pread(watched.descriptor, STACK_BYTES, begin).decode(errors="replace")


# --- torch's own timers --------------------------------------------------------------------------

# Scripts send requests through a named pipe, as under torchrun, with
# TORCHELASTIC_ENABLE_FILE_TIMER=1: workers find the pipe's path in TORCHELASTIC_TIMER_FILE and give
# it to torch's `FileTimerClient`. An expired timer is treated as ours are and ends only the worker;
# torchrun ends the agent as well.

#: Bytes read at a time.
_READ_BYTES = 1 << 16
#: The longest line: a pipe takes that many bytes atomically.
LINE = select.PIPE_BUF
#: Timers of all workers at once; more are ignored.
MOST_TIMERS = 10_000


class PipeRequest(NamedTuple):
    """A request of torch's `FileTimerClient`: a timer, or its release."""

    pid: int
    scope: str
    #: `time.time()`; negative to release the timer.
    expiration_time: float
    #: 0: do not end the process.
    signal: int


def parse_request(line: bytes) -> PipeRequest | None:
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
            asked = parse_request(line)
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
