"""This node among the others: its lease, its member record, its turn to lead, its worlds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from torchelastic.agent.meeting import Meeting, meet
from torchelastic.agent.membership import Membership, claim_name
from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig
from torchelastic.errors import LeaseExpired
from torchelastic.rendezvous.leader import Leader, LeaderObserver
from torchelastic.rendezvous.round_state import RoundRules
from torchelastic.rendezvous.store import Json
from torchelastic.rendezvous.world import NO_PART, WORLD_KEY, Member, World, part_key

logger = logging.getLogger(__name__)

#: Runs something beside the loop; what goes wrong there is the owner's to see.
Background = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class Presence:
    """A node that is a member of a job, and stays one when its lease is lost and opened anew."""

    def __init__(
        self,
        config: LaunchConfig,
        node: str,
        clock: Clock,
        *,
        observer: LeaderObserver,
        background: Background,
        on_world: Callable[[World], None],
        on_lease_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._node = node
        self._clock = clock
        self._observer = observer
        self._background = background
        self._on_world = on_world
        self._on_lease_lost = on_lease_lost
        self._meeting: Meeting | None = None
        self._membership: Membership | None = None
        #: What was said before there was a record to say it.
        self._facts: dict[str, Any] = {}
        #: The part of the last world's nodes that this one may be in.
        self._part: Json = NO_PART
        #: What this node does as a member under its present lease.
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def meeting(self) -> Meeting:
        assert self._meeting is not None, "asked before joining"
        return self._meeting

    @property
    def member(self) -> Member:
        assert self._membership is not None, "asked before joining"
        return self._membership.member

    async def join(self, **facts: Any) -> None:
        """Meet the other nodes and be one of them; `facts` are what the member record says more."""
        self._meeting = await meet(self._config, self._clock)
        name = await self._open_lease()
        member = Member(
            node=self._node,
            name=name,
            addr=self._meeting.addr,
            nproc=self._config.nproc_per_node,
            role=self._config.role,
            node_rank=self._config.node_rank,
            **{**facts, **self._facts},
        )
        self._membership = Membership(self._meeting.store, member)
        self._background(self._watch_world(), "watch-world")
        self._be_member()

    async def rejoin(self, gone: int) -> str:
        """After a lost lease: come as a newcomer; returns the new name."""
        assert self._membership is not None
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        name = await self._open_lease()
        gone = max(gone, self.member.gone)  # a later word stands
        self.update(name=name, gone=gone, failures=())
        self._be_member()
        return name

    def update(self, **changes: Any) -> None:
        """Change the member record, or what it will say once this node has joined."""
        if self._membership is not None:
            self._membership.update(**changes)
        else:
            self._facts.update(changes)

    async def _open_lease(self) -> str:
        """Open a lease and claim a name under it; again where the store took longer than the lease
        to answer."""
        store = self.meeting.store
        while True:
            await store.open_lease(self._config.lease)
            try:
                return await claim_name(store, socket.gethostname(), self._node)
            except LeaseExpired as error:
                logger.debug("the lease ended before it was of use: %s", error)

    def _be_member(self) -> None:
        """Put the member record from now on, and lead when it is our turn, until the lease ends."""
        assert self._membership is not None
        rules = RoundRules.from_config(self._config)
        leader = Leader(self.meeting.store, self._node, rules, self._clock, self._observer)
        self.update()
        self._tasks = [
            self._background(_while_leased(self._membership.run()), "membership"),
            self._background(_while_leased(leader.run()), "leader"),
            self._background(self._watch_lease(), "watch-lease"),
        ]

    async def _watch_world(self) -> None:
        store = self.meeting.store
        listing = await store.get(WORLD_KEY)
        if WORLD_KEY in listing.items:
            await self._see_world(listing.items[WORLD_KEY].value)
        async with contextlib.aclosing(store.watch(WORLD_KEY, after=listing.revision)) as changes:
            async for change in changes:
                if change.item is not None:
                    await self._see_world(change.item.value)

    async def _see_world(self, summary: Json) -> None:
        """Pass a world on, with the part of its nodes that this one may be in.

        Of a world with a newer one behind it there is no part any more: the newer one is told of.
        """
        world = World.from_json(summary)
        if world.count and not world.owns(self._part):
            key = part_key(self._node, world.shards)
            listing = await self.meeting.store.get(key)
            self._part = listing.items[key].value
        if not world.count:
            self._on_world(world)
        elif world.owns(self._part):
            self._on_world(world.with_parts([self._part]))

    async def _watch_lease(self) -> None:
        await self.meeting.store.lease_lost.wait()
        self._on_lease_lost()

    async def last_words(self, seconds: float) -> None:
        """Wait until all that was said has been heard, within reason."""
        if self._membership is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._membership.flush(), seconds)

    async def close(self, others: float) -> None:
        """Go; a host gives the other nodes up to `others` seconds to go first."""
        if self._meeting is not None:
            await self._meeting.close(others)


async def _while_leased(work: Coroutine[Any, Any, None]) -> None:
    """Work that ends quietly with the lease: what follows from that is `_watch_lease`'s to tell."""
    with contextlib.suppress(LeaseExpired):
        await work
