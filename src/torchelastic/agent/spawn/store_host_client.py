"""The agent's side of the store host, which holds the workers' stores (`worker/store_host.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping

from torchelastic.agent.failure_report import exit_words
from torchelastic.agent.spawn.processes import WorkerSpawn
from torchelastic.config import Entry
from torchelastic.errors import SpawnError
from torchelastic.system import linux

logger = logging.getLogger(__name__)

ENTRY = Entry("module", "torchelastic.worker.store_host")

#: Seconds an answer may take; the first one comes after torch is imported.
FIRST_ANSWER, ANSWER = 300.0, 30.0

#: Starts a process, from the zygote or plain, and returns its pid.
Spawner = Callable[[WorkerSpawn], Awaitable[int]]


class StoreHost:
    """Offers a fresh store for each generation and drops those of older ones."""

    def __init__(self, spawn: Spawner, env: Mapping[str, str]) -> None:
        self._spawn = spawn
        self._env = env
        self.pid: int | None = None
        self._pidfd = -1
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lock = asyncio.Lock()
        #: Port by the generation that uses it.
        self._used: dict[int, int] = {}
        #: Ports of the stores it holds, and of those that were lost with earlier store hosts.
        self._held: set[int] = set()
        self.lost: set[int] = set()
        #: Set when the process has exited, cleared by `start`; and how it exited.
        self.ended = asyncio.Event()
        self.end = ""

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            spawn = WorkerSpawn(
                local_rank=-1,
                entry=ENTRY,
                env=self._env,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
            )
            try:
                self.pid = await self._spawn(spawn)
            except BaseException:
                ours.close()
                raise
        self._used.clear()
        self.ended.clear()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._notice_end)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    def _notice_end(self) -> None:
        """Reap it; its stores are lost."""
        exitcode = linux.exitcode(self._pidfd)
        if exitcode is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.end = exit_words(exitcode)
        self.lost |= self._held
        self._held.clear()
        self.ended.set()

    async def open(self) -> int:
        """Return the port of a new store."""
        answer = await self._ask("open", ANSWER if self._held else FIRST_ANSWER)
        if not answer.isdecimal():
            self._kill()
            raise SpawnError(f"The store host sent an invalid answer: {answer!r}.")
        port = int(answer)
        self._held.add(port)
        self.lost.discard(port)
        return port

    def holds(self, generation: int) -> bool:
        """True if this generation uses a store here."""
        return generation in self._used

    def used(self, generation: int, port: int) -> None:
        """The store at `port` serves this generation from now on."""
        self._used[generation] = port

    async def retire(self, before: int) -> None:
        """Drop the stores of generations older than `before`: no worker of theirs is left."""
        for generation in [g for g in self._used if g < before]:
            port = self._used.pop(generation)
            if port in self._held:
                self._held.discard(port)
                with contextlib.suppress(SpawnError):  # gone with its process
                    await self._ask(f"close {port}", ANSWER)

    async def _ask(self, request: str, limit: float) -> str:
        answer = b""
        async with self._lock:
            if self._reader is None or self._writer is None:
                raise SpawnError("The store host is not running.")
            try:
                self._writer.write(f"{request}\n".encode())
                answer = await asyncio.wait_for(self._reader.readline(), limit)
            except asyncio.TimeoutError:
                self._kill()
                raise SpawnError(
                    f"The store host has not answered for {limit:g} s and is killed."
                ) from None
            except ConnectionError:
                pass
        if not answer.endswith(b"\n"):  # it was killed, perhaps while it wrote a number
            self._kill()
            raise SpawnError("The store host has ended.")
        return answer.decode().strip()

    def _kill(self) -> None:
        if self.pid is not None and not self.ended.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> None:
        """Stop and reap the process, if it is still running."""
        if self._writer is not None:
            self._writer.close()
            self._writer = self._reader = None
        if self.pid is not None:
            self._kill()
            await self.ended.wait()
            self.pid = None
