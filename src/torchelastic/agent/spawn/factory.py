"""The process factory: forks workers from the zygote, or starts plain processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from torchelastic.agent.spawn.processes import (
    WorkerSpawn,
    command_line,
    default_python,
    spawn_plain,
)
from torchelastic.agent.spawn.store_host_client import StoreHost
from torchelastic.agent.spawn.zygote_client import Zygote
from torchelastic.agent.workers.supervisor import Supervisor
from torchelastic.best_effort import described
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import SpawnError

logger = logging.getLogger(__name__)

#: Replacements for killed zygotes; then workers start as plain processes. Each imports torch, and
#: the machine that kills them may be short of memory.
MOST_ZYGOTES = 5


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
