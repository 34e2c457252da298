"""Agents of torchelastic without workers, many in one event loop: real members of a real job.

Each is the agent's own `MemberSession`: its connection, lease, record and turn to lead. What
an agent with workers says when they have stopped, these say at once.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, cast

from benchmarks.crowds import traffic
from benchmarks.crowds.channel import COUNT, GO, LEASE, MARK, Share, tell
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.rendezvous.leader import LeaderObserver
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import World


class Silence:
    """A leader's observer that has nobody to tell, whatever it is told."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told: None


class Agent:
    """A node whose workers start and stop in no time."""

    def __init__(self, crowd: Crowd, config: LaunchConfig) -> None:
        self._crowd = crowd
        self._node = secrets.token_hex(8)
        #: The last generation it had a place in, and the last it has said to be gone.
        self._generation = -1
        self._gone = -1
        self._stores = 0
        self.presence = MemberSession(
            config,
            self._node,
            SystemClock(),
            observer=cast(LeaderObserver, Silence()),
            background=crowd.background,
            on_world=self._world_seen,
            on_lease_lost=self._lease_lost,
            host=f"node-{self._node}",  # each stands for a machine of its own
        )

    async def join(self) -> None:
        await self.presence.join(ready=True, store=self._unused_store())

    def _world_seen(self, world: World) -> None:
        if world.phase == "over":
            self._gone = world.generation
            self.presence.update(gone=world.generation)
        elif world.phase == "running" and world.generation > self._generation:
            rank = world.rank(self._node, 0)
            if rank is not None:
                self._enter(world, rank)

    def _enter(self, world: World, rank: int) -> None:
        self._generation = world.generation
        self._crowd.has_world(world, rank)
        if world.store == self.presence.member.store:
            self.presence.update(store=self._unused_store())

    def _lease_lost(self) -> None:
        self._crowd.leases_lost += 1
        self._crowd.background(partial(self.presence.rejoin, self._gone), "rejoin")

    def _unused_store(self) -> str:
        """The address of a store for workers, another one for each; nobody looks for it."""
        self._stores += 1
        return f"{self._node}:{self._stores}"


class Crowd:
    """The agents of this process, and which of them have which world."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed = asyncio.get_running_loop().create_future()
        self._ranks: dict[int, list[int]] = {}
        self._marked: Mapping[str, traffic.Bytes] = {}
        self.leases_lost = 0
        self._agents = [Agent(self, _config(share)) for _ in range(share.agents)]

    def background(
        self, work: Callable[[], Coroutine[Any, Any, Any]], name: str
    ) -> asyncio.Task[Any]:
        task = asyncio.create_task(work(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def has_world(self, world: World, rank: int) -> None:
        """Say so when the last of the agents has it; each comes here once per generation."""
        ranks = self._ranks.setdefault(world.generation, [])
        ranks.append(rank)
        if len(ranks) == self._share.agents:
            tell(
                "world",
                at=time.monotonic(),
                generation=world.generation,
                size=world.size,
                ranks=ranks,
                leases_lost=self.leases_lost,
            )

    async def obey(self) -> None:
        """Follow the orders until they end, or something goes wrong."""
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
        )
        obeying = self.background(partial(self._follow, orders), "orders")
        await asyncio.wait({obeying, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()

    async def _follow(self, orders: asyncio.StreamReader) -> None:
        while order := (await orders.readline()).decode().strip():
            if order == GO:
                self._join()
            elif order == MARK:
                self._marked = traffic.by_connection()
                tell("marked")
            elif order == COUNT:
                carried = traffic.since(self._marked)
                tell("carried", sent=carried.sent, received=carried.received)

    def _join(self) -> None:
        tell("joining", at=time.monotonic())
        for agent in self._agents:
            joining = self.background(agent.join, "join")
            if self._share.hosts:
                joining.add_done_callback(lambda done: tell("up"))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_result(error)


def _config(share: Share) -> LaunchConfig:
    """As other machines would have it: only the host's agent takes the endpoint for its own."""
    hosting = {} if share.backend == "etcd" else {"is_host": str(share.hosts).lower()}
    return LaunchConfig(
        min_nodes=share.least,
        max_nodes=share.most,
        nproc_per_node=1,
        run_id=share.job,
        rdzv_backend=share.backend,
        rdzv_endpoint=share.endpoint,
        rdzv_configs=hosting,
        local_addr="127.0.0.1",
        lease=LEASE,
    )


async def attend(share: Share) -> None:
    crowd = Crowd(share)
    if not share.hosts:
        # An agent has a process and a heap of its own; to look through the heap of thousands of
        # them, again and again, would be work that none of them has. The host is as in life.
        gc.disable()
    tell("ready")
    await crowd.obey()


if __name__ == "__main__":
    asyncio.run(attend(Share.from_command_line()))
