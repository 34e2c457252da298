"""The driver of a node that has no agent: it joins the job, offers stores for its workers, follows
the worlds, and leaves politely. It runs in the event loop of a thread.

Its users add what they do with a world:

- `training.standalone`: one worker, which is this process. The state machine of in-process workers
  decides; orders go over a socket, and a hung worker makes the node leave.
- `compat.torchrun.launcher_node`: workers that another launcher starts. The launcher asks for a
  world from its own thread, and is told when to stop.

An agent (`agent.agent`) opens `MemberSession` itself, which has everything about the lease and its
loss: an agent's stores are in another process, and its reports, snapshots and watchdogs are closed
between the last words of its member record and the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig, format_endpoint
from torchelastic.errors import RendezvousLost, TorchElasticError
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.world import Member, World
from torchelastic.side_tasks import SideTasks

logger = logging.getLogger("torchelastic")


class Stores(Protocol):
    """The part of `OwnStores` used here, which needs torch."""

    def offer(self) -> int: ...

    def begins(self, world: World, offered: str) -> bool: ...

    def close(self) -> None: ...


class NodeDriver:
    """The membership of one node, the tasks beside it, and the stores that it offers."""

    def __init__(
        self,
        config: LaunchConfig,
        stores: Stores,
        *,
        on_world: Callable[[World], None],
        on_lease_lost: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_joined: Callable[[], None] = lambda: None,
        on_lease: Callable[[float], None] = lambda until: None,
    ) -> None:
        """`on_error` receives the error of a task that ends the node; `on_joined` is called before
        the node can be in a world; `on_lease` is as for `MemberSession`."""
        self.node = secrets.token_hex(6)
        self.tasks = SideTasks(on_error)
        self.session = MemberSession(
            config,
            self.node,
            SystemClock(),
            observer=LogObserver(),
            background=self.tasks.start,
            on_world=self._world_seen,
            on_lease_lost=on_lease_lost,
            on_lease=on_lease,
        )
        self._stores = stores
        self._on_world = on_world
        self._on_joined = on_joined
        self._job_closed = False

    def run(
        self,
        main: Callable[[], Coroutine[Any, Any, None]],
        on_error: Callable[[TorchElasticError], None],
    ) -> None:
        """Run `main` in a new event loop, as a thread's function; it uses `membership`."""
        try:
            asyncio.run(main())
        except TorchElasticError as error:
            on_error(error)
        except Exception as error:
            logger.exception("The rendezvous thread of this node failed.")
            on_error(RendezvousLost(f"The rendezvous thread of this node failed: {error!r}"))

    @contextlib.asynccontextmanager
    async def membership(self, **facts: Any) -> AsyncIterator[None]:
        """Join the job in the background, and leave it at the end. `facts` are fields of the member
        record."""
        try:
            self.tasks.start(partial(self._join, **facts), "join")
            yield
        finally:
            await self.session.last_words()
            await self.tasks.cancel()
            await self.session.close(job_closed=self._job_closed)
            self._stores.close()

    async def _join(self, **facts: Any) -> None:
        await self.session.join(**facts)
        self._on_joined()
        self._offer_store()

    def _offer_store(self) -> None:
        port = self._stores.offer()
        self.session.update(store=format_endpoint(self.session.backend.addr, port))

    def _world_seen(self, world: World) -> None:
        logger.info("generation %d: %s (%s)", world.generation, world.phase, world.reason)
        if world.phase == "running" and self._stores.begins(world, self.session.member.store):
            self._offer_store()
        self._job_closed = world.phase == "closed"
        self._on_world(world)


class LogObserver:
    """A `LeaderObserver` for nodes without an event log: it logs what a leader sees and decides."""

    def became_leader(self) -> None:
        logger.debug("this node is the leader")

    def node_joined(self, member: Member) -> None:
        logger.info("%s joined", member.name)

    def node_lost(self, name: str, reason: str) -> None:
        logger.info("%s is lost: %s", name, reason)

    def node_leaving(self, member: Member) -> None:
        logger.info("%s is leaving (%s)", member.name, member.leaving)

    def decided(self, world: World, kind: Kind | None) -> None:
        logger.debug("decided: generation %d %s (%s)", world.generation, world.phase, kind)

    def without_host(self, sentence: str) -> None:
        logger.warning("%s", sentence)

    def say(self, sentence: str) -> None:
        logger.info("%s", sentence)
