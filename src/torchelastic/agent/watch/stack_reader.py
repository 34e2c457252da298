"""Stack traces of this node's workers.

    torchelastic.train, and it answers   the control thread writes it, under the GIL
    any other Python worker              its main thread writes its own at a signal
                                         (`worker/stack_dump.py`)
    frozen, or it does not get that      read from outside by py-spy, where that is installed

All are safe at any time. At the signal a thread writes only its own stack: the others run on, and
reading their frames could crash the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.agent.spawn.run_program import run_program
from torchelastic.errors import SpawnError
from torchelastic.events.analysis.hangs import tidy
from torchelastic.system import linux
from torchelastic.worker import orders, stack_dump

if TYPE_CHECKING:
    from torchelastic.agent.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

#: Seconds that py-spy may take, and bytes of a stack that are read.
PY_SPY_TIMEOUT, STACK_BYTES = 2.0, 1 << 16
#: Seconds that a worker has to write its stacks, and a control thread to answer; between two looks.
STACKS_TIMEOUT, ANSWER_TIMEOUT, LOOK = 1.0, 0.2, 0.005

FROZEN = "it is frozen: no stack could be read"
NOTHING = "no stack could be read"


def is_frozen(pid: int | None) -> bool:
    """True if a process is stopped by a signal or a debugger."""
    return _state(Path(f"/proc/{pid}")) in ("T", "t")


def is_busy(pid: int) -> bool:
    """True if a thread of a process runs, waits for a CPU, or reads a disk."""
    with suppress(OSError):
        return any(_state(task) in ("R", "D") for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def _state(process: Path) -> str:
    """The kernel's state letter of a process or a thread; empty if it is gone."""
    with suppress(OSError):
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


async def stack_of(pid: int | None, helpers: set[int]) -> str:
    """Read the Python stacks of a process with py-spy; empty if that fails.

    `helpers` are the agent's children that are not workers. py-spy becomes one of them, so that its
    exit is not taken for that of a worker's orphan.
    """
    program = shutil.which("py-spy")
    if program is None or pid is None:
        return ""
    # Memory, not a pipe: it needs no reader.
    memory = os.memfd_create("torchelastic-py-spy", os.MFD_CLOEXEC)
    try:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        with open(os.devnull, "r+b", buffering=0) as null:
            streams = (null.fileno(), memory, null.fileno())
            running = run_program(command, env.snapshot(), streams, helpers, PY_SPY_TIMEOUT)
            is_read = await running is not None
        return os.pread(memory, STACK_BYTES, 0).decode(errors="replace") if is_read else ""
    except SpawnError as error:
        logger.warning("%s Repair or remove it.", error)
        return ""
    finally:
        os.close(memory)


_numbers = count(1)


async def answered(workers: WorkerPool, local_rank: int, seconds: float) -> orders.Pong | None:
    """The control thread's answer about its worker; None if it does not answer in time."""
    number = next(_numbers)
    workers.tell(local_rank, orders.Ping(number))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pong = workers.pong(local_rank)
        if pong is not None and pong.number >= number:
            return pong
        await asyncio.sleep(0.002)
    return None


class Stacks:
    """Reads the stacks of one node's workers, one request at a time for each."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._reading: dict[int, asyncio.Lock] = {}

    async def of(self, local_rank: int) -> str:
        """Return the stack, or a sentence that says why there is none, within seconds."""
        async with self._reading.setdefault(local_rank, asyncio.Lock()):
            pid = self._workers.pid(local_rank)
            if pid is None:
                return "it has ended"
            if (last := self._workers.last_stack(local_rank)) is not None:
                return last
            if is_frozen(pid):
                return await self._from_outside(pid) or FROZEN
            dump = await self._told(local_rank) or await self._signalled(local_rank, pid)
            return tidy(dump) if dump else await self._from_outside(pid) or NOTHING

    async def _from_outside(self, pid: int) -> str:
        return await stack_of(pid, self._workers.helpers)

    async def _told(self, local_rank: int) -> str:
        """Have the control thread write the stack; empty if there is none or it is late."""
        if not self._workers.is_in_process(local_rank):
            return ""
        descriptor = os.memfd_create("torchelastic-stack", os.MFD_CLOEXEC)
        try:
            self._workers.tell(local_rank, orders.Dump(), [descriptor])
            # Orders are obeyed one by one: the answer comes when it is written.
            pong = await answered(self._workers, local_rank, ANSWER_TIMEOUT)
            return _end_of(descriptor, 0) if pong is not None else ""
        finally:
            os.close(descriptor)

    async def _signalled(self, local_rank: int, pid: int) -> str:
        memory = self._workers.stack_memory(local_rank)
        if memory is None or self._workers.last_stack(local_rank) is not None:
            return ""
        own = os.dup(memory)  # the worker may end meanwhile
        try:
            return await written_stack(pid, own)
        finally:
            os.close(own)


async def written_stack(pid: int, memory: int) -> str:
    """Have a process write its stack to this memory by a signal; empty if it does not."""
    if not _may_signal(pid, memory):
        return ""
    os.ftruncate(memory, stack_dump.STACKS_AT)
    os.lseek(memory, stack_dump.STACKS_AT, os.SEEK_SET)  # where the worker writes: it is shared
    main = Path(f"/proc/{pid}")  # its signal masks are the main thread's
    if not _signals(main, "SigPnd"):  # still pending from an earlier request
        try:
            linux.signal_thread(pid, pid, stack_dump.SIGNAL)
        except OSError as error:
            logger.debug("cannot ask process %d for its stack: %r", pid, error)
            return ""

    def is_written() -> bool:
        # A thread that runs a handler has its signal blocked.
        return (
            os.fstat(memory).st_size > stack_dump.STACKS_AT
            and not _signals(main, "SigPnd")
            and not _signals(main, "SigBlk")
        )

    deadline = time.monotonic() + STACKS_TIMEOUT
    while not is_written() and time.monotonic() < deadline:
        await asyncio.sleep(LOOK)
    return _end_of(memory, stack_dump.STACKS_AT)


def _end_of(descriptor: int, begin: int) -> str:
    """Read the end of a long dump: the main thread is written last."""
    begin = max(begin, os.fstat(descriptor).st_size - STACK_BYTES)
    return os.pread(descriptor, STACK_BYTES, begin).decode(errors="replace")


def _may_signal(pid: int, memory: int) -> bool:
    """True if the worker is prepared: otherwise the signal would kill it or, if the script has
    closed all descriptors, the stack would go to one of the script's files."""
    number = stack_dump.written_to(memory)
    if number is None or not _signals(Path(f"/proc/{pid}"), "SigCgt"):
        return False
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{stack_dump.NAME}")
    return False


def _signals(process: Path, mask: str) -> bool:
    """True if our signal is in this signal mask of a process."""
    with suppress(OSError, ValueError):
        for line in (process / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == mask:
                return bool(int(value, 16) >> (stack_dump.SIGNAL - 1) & 1)
    return False
