"""When neighbours doubt that an agent lives: the leader asks it, and decides.

An agent that lives answers, or, cut off from the leader by a firewall, has put its record anew
because its own connections ended as well. One that does neither is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.store import Store
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member

logger = logging.getLogger(__name__)

#: Seconds in which an agent that does not answer may be heard of through the store.
HEARSAY = 0.02

#: Asks the agent at an address: it lives, nobody is there, or there is no telling.
Ask = Callable[[str], Awaitable[bool | None]]


async def give_up_leader(store: Store, doubted: Collection[str], ask: Ask) -> None:
    """Of any member: if the leader itself is doubted, ask it and give it up; who else would?"""
    leaders = await store.get(LEADER_KEY)
    leader = leaders.items.get(LEADER_KEY)
    if leader is None or leader.value["node"] not in doubted:
        return
    key = MEMBER_PREFIX + leader.value["node"]
    before = (await store.get(key)).items.get(key)
    if before is None or await ask(Member.from_json(before.value).peer):
        return
    await asyncio.sleep(HEARSAY)
    after = (await store.get(key)).items.get(key)
    if after == before:
        logger.info("the leader, %s, is given up: it does not answer", before.value["name"])
        await store.give_up(key, created=before.created, provided=(LEADER_KEY, leader.created))


class Doubts:
    """The doubts of the present leader."""

    def __init__(self, ask: Ask, give_up: Callable[[str], Awaitable[None]]) -> None:
        self._ask = ask
        self._give_up = give_up
        #: How often each node has put its record, as seen here.
        self._records: dict[str, int] = {}
        self._peers: dict[str, str] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def heard(self, member: Member) -> None:
        """A member has put its record."""
        self._records[member.node] = self._records.get(member.node, 0) + 1
        self._peers[member.node] = member.peer
        for node in member.doubts:
            if self._peers.get(node) and node not in self._asking:
                task = asyncio.create_task(self._look_into(node), name="doubt")
                self._asking[node] = task
                task.add_done_callback(partial(self._asked, node))

    def lost(self, node: str) -> None:
        """A member is gone."""
        self._records.pop(node, None)
        self._peers.pop(node, None)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, node: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(node, None)

    async def _look_into(self, node: str) -> None:
        records = self._records.get(node)
        if await self._ask(self._peers[node]):
            return
        await asyncio.sleep(HEARSAY)
        if records is None or self._records.get(node) != records:
            return  # it is heard of, or gone already
        logger.info("node %s is given up: its connections ended, and it does not answer", node)
        try:
            await self._give_up(node)
        except RendezvousError as error:
            logger.debug("whether %s is given up will be seen: %s", node, error)
