"""The helper processes of a node, the zygote and the store host: started, used and replaced.

The node survives the loss of either. A new store host is started, and a world that used the lost
store is replaced if its workers still needed it. A new zygote is started, and workers that start
meanwhile are plain processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torchelastic.agent.failure_report import exit_words
from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.spawn.processes import (
    WorkerSpawn,
    command_line,
    default_python,
    spawn_plain,
)
from torchelastic.agent.spawn.zygote_client import Zygote
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.workers.supervisor import Supervisor
from torchelastic.best_effort import described
from torchelastic.clock import Clock
from torchelastic.config import Entry, LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import SpawnError
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import pause
from torchelastic.system import linux

if TYPE_CHECKING:
    from torchelastic.agent.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

STORE_HOST = Entry("module", "torchelastic.worker.store_host")
#: Seconds an answer may take; the first one comes after torch is imported.
FIRST_ANSWER_TIMEOUT, ANSWER_TIMEOUT = 300.0, 30.0
#: Starts a process, from the zygote or plain, and returns its pid.
Spawner = Callable[[WorkerSpawn], Awaitable[int]]
#: Replacements for killed zygotes; then workers start as plain processes. Each imports torch, and
#: the machine that kills them may be short of memory.
MOST_ZYGOTES = 5
#: A store host that exits within this many seconds is restarted with a growing pause, and fails the
#: node when that happens too often in a row (`side_tasks.RESTARTABLE`).
STEADY = 10.0
STORE_LOST = "the workers' store host exited"


class StoreHost:
    """The agent's side of the store host (`worker/store_host.py`), which holds the workers' stores.

    It offers a fresh store for each generation and drops those of older ones.
    """

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
                entry=STORE_HOST,
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
        answer = await self._ask("open", ANSWER_TIMEOUT if self._held else FIRST_ANSWER_TIMEOUT)
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
            # While one is closed, a later world may retire the others.
            port = self._used.pop(generation, -1)
            if port in self._held:
                self._held.discard(port)
                with contextlib.suppress(SpawnError):  # gone with its process
                    await self._ask(f"close {port}", ANSWER_TIMEOUT)

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


class ProcessFactory:
    """The zygote and the store host of one agent."""

    def __init__(self, config: LaunchConfig, entry: Entry, env: Mapping[str, str]) -> None:
        self._python = default_python()
        #: Pids of our children that are not workers.
        self.pids: set[int] = set()
        self.zygote: Zygote | None = None
        #: Replacements of killed zygotes so far.
        self.replaced = 0
        #: Why there is no zygote, though one is wanted.
        self._without = ""
        if config.zygote and entry.kind != "program":
            try:
                self._start = partial(
                    Zygote.start,
                    python=self._python,
                    env=env,
                    preload=config.preload,
                    command=command_line(entry, self._python),
                    preforks=config.nproc_per_node,
                )
                self.zygote = self._start_zygote()
            except (SpawnError, OSError) as error:
                self._without = f"the zygote could not be started: {error}"
        self.stores = StoreHost(self._spawn, env)

    def _start_zygote(self) -> Zygote:
        zygote = self._start()
        self.pids.add(zygote.pid)
        return zygote

    def serve(self, supervisor: Supervisor) -> None:
        """Give a supervisor the zygote, and each replacement."""
        supervisor.exempt = self.pids
        self._supervisor = supervisor

    @property
    def warnings(self) -> list[str]:
        """Modules the zygote could not import, one sentence each."""
        return self.zygote.warnings if self.zygote is not None else []

    async def warm_up(self) -> float | str | None:
        """Start zygote and store host; the zygote's seconds, or why there is none."""
        ready = await self.wait_for_zygote()
        with contextlib.suppress(SpawnError, OSError):  # offering a store tries again
            await self.stores.start()
        return ready

    async def wait_for_zygote(self) -> float | str | None:
        """Wait for the zygote: the seconds its imports took, or why there is none."""
        if self.zygote is None:
            return self._without or None
        try:
            return await self.zygote.wait_ready()
        except Exception as error:  # workers start without it, more slowly
            self.zygote.aside = f"the zygote failed: {described(error)}"
            return self.zygote.aside

    async def zygote_killed(self) -> str:
        """Wait until the zygote is killed; say how, or empty if it is not to be replaced."""
        how = await self.zygote.killed() if self.zygote is not None else ""
        if how and self.replaced == MOST_ZYGOTES:
            logger.warning(
                "The zygote was killed %d times (the last: %s). New workers on this "
                "node start as plain processes (slower).",
                MOST_ZYGOTES + 1,
                how,
            )
            return ""
        return how

    async def replace_zygote(self) -> None:
        """Start another zygote in place of one that was killed; returns while it still imports."""
        assert self.zygote is not None
        await self.zygote.close()
        self.pids.discard(self.zygote.pid)
        self.replaced += 1
        self.zygote = self._start_zygote()
        self._supervisor.use_zygote(self.zygote)

    async def replace_store_host(self) -> None:
        """Start another process for the stores in place of one that has ended."""
        ended = self.stores.pid
        await self.stores.close()
        self.pids.discard(ended or 0)
        await self.stores.start()

    async def _spawn(self, spawn: WorkerSpawn) -> int:
        pid = await self._fork(spawn) or spawn_plain(spawn, python=self._python)
        self.pids.add(pid)
        return pid

    async def _fork(self, spawn: WorkerSpawn) -> int | None:
        if self.zygote is None or not self.zygote.usable:
            return None
        try:
            return await self.zygote.fork(spawn)
        except SpawnError as error:
            logger.info("%s starts as a plain process: %s", spawn.entry.target, error)
            return None

    async def close(self) -> None:
        await self.stores.close()
        if self.zygote is not None:
            await self.zygote.close()


@dataclass
class HelperRestarts:
    """The helper processes of one agent, and what their loss means for its workers."""

    factory: ProcessFactory
    session: MemberSession
    workers: WorkerPool
    reporter: Reporter
    clock: Clock
    state: Callable[[], ScriptState | InProcessState]

    # --- the store host --------------------------------------------------------------------------

    async def keep_store_host(self) -> None:
        """Keep a store available: replace the store host when it exits."""
        stores = self.factory.stores
        while True:
            if stores.pid is None or stores.ended.is_set():
                await self.factory.replace_store_host()
            await self._offer_store()
            offered = self.clock.now()
            self.session.update(ready=True)
            await stores.ended.wait()
            self.session.update(store="")
            if stores.holds(self.state().generation):
                self.store_host_lost()
            how = f"{STORE_LOST} ({stores.end})"
            if self.clock.now() < offered + STEADY:
                raise SpawnError(how)
            self.reporter.say(f"{how}: starting another one")

    async def _offer_store(self) -> None:
        port = await self.factory.stores.open()
        self.session.update(store=format_endpoint(self.session.backend.addr, port))

    async def renew_store(self, world: World) -> None:
        """Offer a new store, since a generation uses up its store; drop older ones."""
        stores = self.factory.stores
        if world.store and world.store == self.session.member.store:
            stores.used(world.generation, parse_endpoint(world.store)[1])
            self.session.update(store="")
            with contextlib.suppress(SpawnError):  # `keep_store_host` handles that
                await self._offer_store()
        # Workers that finish a step of the last generation still use its store.
        await stores.retire(before=world.generation - (world.after is not None))

    def store_host_lost(self) -> None:
        """End the generation that used the lost store, if it still needs it.

        Workers of a script could not find each other any more. In-process workers that have formed
        their group need no store; those that are entering it start over, and none is replaced.
        """
        state = self.state()
        if not isinstance(state, InProcessState):
            self.workers.fail(0, STORE_LOST)
            return
        for local_rank in state.having(Status.TRAINING):
            if self.workers.entering_since(local_rank) is not None:
                self.workers.fail(local_rank, STORE_LOST, alive=True)
                return

    def check_store(self, store: str, local_rank: int, *, alive: bool) -> None:
        """Fail a worker that was sent to a store of ours that was already gone."""
        addr = self.session.backend.addr
        if store in {format_endpoint(addr, port) for port in self.factory.stores.lost}:
            self.workers.fail(local_rank, STORE_LOST, alive=alive)

    # --- the zygote ------------------------------------------------------------------------------

    async def keep_zygote(self) -> None:
        """Keep a zygote available: replace one that is killed."""
        factory = self.factory
        while how := await factory.zygote_killed():
            again = pause(factory.replaced + 1)
            self.reporter.say(
                f"The zygote was {how}. Another one starts in {again:g} s; until it is ready, "
                "workers start as plain processes. Training is not affected."
            )
            await asyncio.sleep(again)
            await factory.replace_zygote()
            self.reporter.warmed_up(await factory.wait_for_zygote(), [])
