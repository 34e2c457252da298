"""Keep the helper processes of a node running: the store host and the zygote.

The node survives the loss of either. A new store host is started, and a world that used the lost
store is replaced if its workers still needed it. A new zygote is started, and workers that start
meanwhile are plain processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.spawn.factory import ProcessFactory
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.clock import Clock
from torchelastic.config import format_endpoint, parse_endpoint
from torchelastic.errors import SpawnError
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import pause

#: A store host that exits within this many seconds is restarted with a growing pause, and fails the
#: node when that happens too often in a row (`side_tasks.RESTARTABLE`).
STEADY = 10.0
STORE_LOST = "the workers' store host exited"


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

        Workers of a script could not find each other any more. Resident workers that have formed
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
