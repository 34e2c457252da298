"""Run a program beside the agent's loop, as one of the agent's helpers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from torchelastic.agent.spawn.processes import start_program
from torchelastic.system import linux

#: Seconds for a killed program to exit: it may wait for a disk.
KILL_TIMEOUT = 5.0


async def run_program(
    command: Sequence[str],
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    helpers: set[int],
    timeout: float,
) -> int | None:
    """Run a program; return its exit code, None if it was killed after the time limit.

    `helpers` are the agent's children that are not workers. The program becomes one of them, so
    that its exit is not taken for that of a worker's orphan. Raises `SpawnError` if it cannot
    run.
    """
    pid = start_program(command, env=env, streams=streams)
    helpers.add(pid)
    pidfd = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int | None] = loop.create_future()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def reap() -> None:
        loop.remove_reader(pidfd)
        kill()  # also what it has started; its pid is not reused before it is reaped
        ended.set_result(linux.exitcode(pidfd))
        os.close(pidfd)
        helpers.discard(pid)

    loop.add_reader(pidfd, reap)
    try:
        in_time, _ = await asyncio.wait({ended}, timeout=timeout)
        return ended.result() if in_time else None
    finally:  # after a cancellation, too
        if not ended.done():
            kill()
            await asyncio.wait({ended}, timeout=KILL_TIMEOUT)
