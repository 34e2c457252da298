"""The timers of this node's workers: who has not come out of a block in time is ended.

The agent reads every worker's table (`timer/timer_table.py`) every quarter of a second, or when the
next timer expires if that is sooner, and not at all before a worker has its first timer.
Once it has decided, the worker writes its stacks, and is killed: nothing spares it any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchelastic.agent.watch.file_timers import FileTimers
from torchelastic.agent.watch.stack_reader import (
    FROZEN,
    NOTHING,
    STACK_BYTES,
    is_busy,
    is_frozen,
    stack_of,
)
from torchelastic.best_effort import observing
from torchelastic.events.analysis.hangs import tidy
from torchelastic.system import linux
from torchelastic.timer.timer_table import MESSAGE, STACKS_AT, Timer, read

if TYPE_CHECKING:
    from torchelastic.agent.watch.hang_report import HangReport
    from torchelastic.agent.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

#: Seconds between two looks: how late a timer can be seen that is shorter than this.
LOOK = 0.25
#: Seconds that a worker has to write its stacks, and between two looks at what is written. After so
#: many looks at the same, all is, even if the worker is busy.
WRITTEN, LOOK_AGAIN, SAME = 5.0, 0.02, 25


@dataclass(frozen=True)
class Watched:
    """A worker that has timers."""

    pid: int
    #: Its table.
    descriptor: int
    #: What it writes its stacks at.
    signum: int


class Timers:
    """Watches the tables that workers hand over, and what they ask torch's timers for."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._file: FileTimers | None = None
        #: From the first timer on.
        self._some = asyncio.Event()
        #: Tells what all ranks were doing when a timer expired, where somebody can find out.
        self.report: HangReport | None = None

    # --- what workers say ------------------------------------------------------------------------

    def handed(
        self, local_rank: int, pid: int | None, message: Mapping[str, Any], descriptor: int
    ) -> None:
        """A worker has handed over its table."""
        signum: Any = message.get("signal")
        known = message.get("type") == MESSAGE and _may_be_sent(signum)
        if pid is None or not known or not linux.is_memory(descriptor):
            logger.debug("worker %d sent an invalid timer table", local_rank)
            os.close(descriptor)
            return
        self.ended(local_rank)
        self._watched[local_rank] = Watched(pid, descriptor, int(signum))
        self._some.set()

    def take_also(self, file: FileTimers) -> None:
        """Torch's timers, too, which are closed with these."""
        self._file = file
        file.listen(self._some.set)

    def ended(self, local_rank: int) -> None:
        """The worker is gone, and its timers with it."""
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
        """For as long as the agent runs."""
        while True:
            await self._some.wait()
            now = time.monotonic()
            found = self._look({rank: workers.pid(rank) or 0 for rank in workers.alive})
            late = {rank: timer for rank, timers in found.items() if (timer := first(timers, now))}
            if late and not workers.stopping:
                await asyncio.gather(*(self._end(*each, workers) for each in late.items()))
            await asyncio.sleep(pause(_all(found.values()), now))

    def _look(self, pids: Mapping[int, int]) -> dict[int, list[Timer]]:
        """The timers of each worker, by its local rank."""
        found = {rank: read(seen.descriptor) for rank, seen in self._watched.items()}
        if self._file is not None:
            self._file.keep(pids.values())
            for rank, pid in pids.items():
                found.setdefault(rank, []).extend(self._file.of(pid))
        return found

    async def _end(self, local_rank: int, timer: Timer, workers: WorkerPool) -> None:
        """Have the stacks written of a worker whose timer has expired, then end it."""
        pid, stack = workers.pid(local_rank), NOTHING
        with observing("Reading the stack of a worker whose timer expired"):
            stack = await self._last_stack(local_rank, timer, workers)
        if pid is not None and workers.pid(local_rank) == pid:
            self.ended(local_rank)
            if self._file is not None:
                self._file.forget(pid)
            workers.kill(local_rank, words(timer), stack)

    async def _last_stack(self, local_rank: int, timer: Timer, workers: WorkerPool) -> str:
        """What it does, after all has been told that is seen of it."""
        pid, watched = workers.pid(local_rank), self._watched.get(local_rank)
        if watched is None:
            stack = await self._seen(local_rank, workers)
            stack = stack or await stack_of(pid, workers.helpers) or NOTHING
        else:
            # Its threads run while it reads their frames, which may end it before we do.
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
        """Tell what all ranks were doing; the stack of this one."""
        if self.report is None:
            return ""
        found = await self.report.found(workers.generation(local_rank))
        self.report.tell(found)
        rank = workers.rank(local_rank)
        return next((one.stack for one in found.doings if one.rank == rank), "")


def first(timers: Iterable[Timer], now: float) -> Timer | None:
    """Of the timers that have expired, the one that did first."""
    expired = [timer for timer in timers if timer.expires_at <= now]
    return min(expired, key=lambda timer: timer.expires_at, default=None)


def pause(timers: Iterable[Timer], now: float) -> float:
    """Seconds until the next look."""
    ahead = [timer.expires_at - now for timer in timers if timer.expires_at > now]
    return min(LOOK, *ahead) if ahead else LOOK


def words(timer: Timer) -> str:
    """What the worker has failed by."""
    return f"timer '{timer.scope}' expired after {timer.after:g} s"


def _all(found: Iterable[list[Timer]]) -> list[Timer]:
    return [timer for timers in found for timer in timers]


def _may_be_sent(signum: object) -> bool:
    """A signal for this purpose, and none that would do something else to the worker."""
    return isinstance(signum, int) and signal.SIGRTMIN <= signum <= signal.SIGRTMAX


# --- stacks --------------------------------------------------------------------------------------


async def _stack(watched: Watched, helpers: set[int]) -> str:
    """What the worker's threads are doing: as it writes itself, else read from outside."""
    if is_frozen(watched.pid):
        return await stack_of(watched.pid, helpers) or FROZEN
    written = tidy(await _written_stack(watched))
    return written or await stack_of(watched.pid, helpers) or NOTHING


async def _written_stack(watched: Watched) -> str:
    """What the worker writes when it gets the signal; the thread that gets it stops there."""
    begin = max(os.fstat(watched.descriptor).st_size, STACKS_AT)
    try:
        os.kill(watched.pid, watched.signum)
    except ProcessLookupError:
        return ""
    size, same, deadline = begin, 0, time.monotonic() + WRITTEN
    while same < SAME and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_AGAIN)
        before, size = size, os.fstat(watched.descriptor).st_size
        same = same + 1 if size == before > begin else 0
        if same and not is_busy(watched.pid):
            break  # who has written stands still: it does not wait for a processor to go on
    # Of too much, the end: the main thread, the oldest, is written last.
    begin = max(begin, size - STACK_BYTES)
    return os.pread(watched.descriptor, STACK_BYTES, begin).decode(errors="replace")
