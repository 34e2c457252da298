"""Where this node's processes come from: the zygote while it can, plain processes otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torchelastic import env as environment
from torchelastic.agent.processes import spawn_plain
from torchelastic.agent.store_host import StoreHost
from torchelastic.agent.supervisor import WorkerSpawn
from torchelastic.agent.zygote import Zygote
from torchelastic.config import Entry, LaunchConfig


class Nursery:
    """The zygote and the store host of one agent."""

    def __init__(self, config: LaunchConfig, entry: Entry, env: Mapping[str, str]) -> None:
        self.python = environment.get("PYTHON_EXEC", sys.executable)
        self.zygote: Zygote | None = None
        if config.zygote and entry.kind != "program":
            self.zygote = Zygote.start(
                python=self.python,
                env=env,
                preload=config.preload,
                command=command_line(self.python, entry),
            )
        self.stores = StoreHost(self._spawn, env)

    @property
    def pids(self) -> set[int]:
        """Helper processes that are not workers."""
        pids = {self.zygote.pid} if self.zygote is not None else set()
        return pids | ({self.stores.pid} if self.stores.pid is not None else set())

    async def warm_up(self) -> float | str | None:
        """Be able to start workers at once: the zygote's seconds, or why there is none."""
        ready = await self.zygote.wait_ready() if self.zygote is not None else None
        await self.stores.start()
        return ready

    async def _spawn(self, spawn: WorkerSpawn) -> int:
        if self.zygote is not None and self.zygote.usable:
            return await self.zygote.fork(spawn, None)
        return spawn_plain(spawn, python=self.python, channel_fd=None)

    async def close(self) -> None:
        await self.stores.close()
        if self.zygote is not None:
            await self.zygote.close()


def command_line(python: str, entry: Entry) -> list[str]:
    """What `ps` shows for a worker: the command a user would have typed."""
    module = ["-m"] if entry.kind == "module" else []
    return [python, "-u", *module, entry.target, *entry.args]
