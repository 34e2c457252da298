"""The output of processes without an agent: log files, and a thread that shows tee'd output."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from torchelastic.agent.output.log_files import GenerationLogs, WorkerStreams
from torchelastic.agent.output.output_stream import OutputStream
from torchelastic.config import LaunchConfig, Std, std_for

#: How long to wait for the last output when all processes are gone, in seconds.
LAST_OUTPUT = 2.0


class Output:
    """The output streams of one group of processes.

    Uses the agent's code, which needs an event loop. The caller's thread may have none, or a busy
    one, so streams to be shown get a thread with its own loop.
    """

    def __init__(self, config: LaunchConfig, directory: Path) -> None:
        self._local_ranks = range(config.nproc_per_node)
        self._consoles: dict[Std, OutputStream] = {}
        self._logs = GenerationLogs(config, directory, self._consoles)
        self._loop: asyncio.AbstractEventLoop | None = None
        if any(std_for(config.tee, local_rank) for local_rank in self._local_ranks):
            self._consoles.update({Std.OUT: OutputStream(1), Std.ERR: OutputStream(2)})
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="torchelastic-output", daemon=True
            )
            self._thread.start()

    def open(self) -> dict[int, WorkerStreams]:
        """Create the files and pipes; return the streams for each process by local rank."""
        if self._loop is not None:
            self._run(self._open(), self._loop)
        else:
            self._make()
        return self._logs.streams

    def started(self) -> None:
        """The processes have their copies of the descriptors: close ours."""
        self._logs.started()

    def finish(self) -> None:
        """The processes are gone: show what is left, close everything, end the thread."""
        if self._loop is None:
            self._close()
            return
        self._run(self._drain(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _open(self) -> None:
        self._make()

    async def _drain(self) -> None:
        await self._logs.drained(LAST_OUTPUT)
        self._close()

    def _make(self) -> None:
        self._logs.make({local_rank: local_rank for local_rank in self._local_ranks})

    def _close(self) -> None:
        self._logs.close()
        for console in self._consoles.values():
            console.close()
