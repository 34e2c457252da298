"""Suspicion of an agent, where the store would be slow to notice its end: who asks, who decides.

Neighbours in the ring doubt an agent whose connection ended or fell silent. The leader asks it.
What becomes of an agent that does not answer depends on how:

    refused    nobody listens at its port: it is given up, unless it has just put its record anew,
               because its own connections ended as well; a firewall refuses in its name
    silence    it is frozen, or a cut lies between, and it is not known on which side: it is given
               up if a second node doubts it, too, or it is silent at the store as well; else its
               lease decides. That it speaks to the store does not help the others, who need it
               for every step

So a node that is cut off from all others, but not from the store, gives nobody up; the others give
it up. If the leader is that node, it notices that many do not answer, and resigns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.store import Item, Store
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member

logger = logging.getLogger(__name__)

#: Seconds in which an agent that does not answer may be heard of through the store.
HEARSAY = 0.02
#: How many must find an agent silent.
DOUBTERS = 2
#: How many members a leader asks that finds one silent alone.
SURVEYED = 8

#: Asks the agent at an address: it lives, nobody is there, or there is no telling.
Ask = Callable[[str], Awaitable[bool | None]]
#: Gives a node up, and says whether it is one that others could not reach.
GiveUp = Callable[[str, bool], Awaitable[None]]


def is_gone(
    answer: bool | None, doubters: Collection[str], *, heard_of: bool, frozen: bool = False
) -> bool:
    """Whether an agent that was asked is given up.

    `heard_of`: it has put its record since. `frozen`: it has been silent everywhere for a while,
    and does not doubt who doubts it, as one that is cut off would.
    """
    if answer is None:
        return frozen or len(doubters) >= DOUBTERS
    return not answer and not heard_of


async def _ask_twice(ask: Ask, address: str) -> bool | None:
    """Silence may be that of a busy machine."""
    answer = await ask(address)
    return await ask(address) if answer is None else answer


def must_resign(answers: Collection[bool | None]) -> bool:
    """Whether a leader that got these answers from the others cannot reach half of the members.

    Of two nodes the lease decides.
    """
    members, silent = len(answers) + 1, sum(answer is None for answer in answers)
    return members > DOUBTERS and 2 * silent >= members


def doubters_of(node: str, doubts: Mapping[str, Collection[str]]) -> set[str]:
    """Who doubts a node, given whom each node doubts."""
    return {other for other, doubted in doubts.items() if node in doubted}


async def give_up_leader(
    store: Store, node: str, doubted: Collection[str], ask: Ask, *, again: float
) -> None:
    """Of a member: while the leader itself is doubted, ask it, and give it up; who else would?

    Asks every `again` seconds. Ends when another leads, or the leader is not `doubted`.
    """
    first: Item | None = None
    while True:
        leaders = await store.get(LEADER_KEY)
        leader = leaders.items.get(LEADER_KEY)
        if leader is None or leader.value["node"] not in doubted:
            return
        key = MEMBER_PREFIX + leader.value["node"]
        before = (await store.get(key)).items.get(key)
        if before is None:
            return
        answer = await _ask_twice(ask, Member.from_json(before.value).peer)
        await asyncio.sleep(HEARSAY)
        members = (await store.get(MEMBER_PREFIX)).items
        doubts = {item.value["node"]: item.value.get("doubts", ()) for item in members.values()}
        doubters = doubters_of(leader.value["node"], doubts) | {node}
        frozen = first == members.get(key) and node not in before.value.get("doubts", ())
        if is_gone(answer, doubters, heard_of=members.get(key) != before, frozen=frozen):
            logger.info("the leader, %s, does not answer; dropping it", before.value["name"])
            await store.give_up(key, created=before.created, provided=(LEADER_KEY, leader.created))
            return
        first = before
        await asyncio.sleep(again)


class Suspicion:
    """The doubts of the present leader."""

    def __init__(self, node: str, ask: Ask, give_up: GiveUp, *, again: float) -> None:
        """`node` is the leader itself, which gives itself up where it must resign. A node that only
        the leader finds silent is asked again after `again` seconds."""
        self._node = node
        self._again = again
        self._ask = ask
        self._give_up = give_up
        #: How often each node has put its record, as seen here.
        self._records: dict[str, int] = {}
        self._peers: dict[str, str] = {}
        #: Whom each node doubts.
        self._suspicion: dict[str, tuple[str, ...]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def heard(self, member: Member) -> None:
        """A member has put its record."""
        self._records[member.node] = self._records.get(member.node, 0) + 1
        self._peers[member.node] = member.peer
        self._suspicion[member.node] = member.doubts
        # Who was doubted before it joined again is looked into now: nobody says so a second time.
        again = [member.node] if doubters_of(member.node, self._suspicion) else []
        for node in (*member.doubts, *again):
            if self._peers.get(node) and node not in self._asking:
                task = asyncio.create_task(self._look_into(node), name="doubt")
                self._asking[node] = task
                task.add_done_callback(partial(self._asked, node))

    def lost(self, node: str) -> None:
        """A member is gone."""
        for known in (self._records, self._peers, self._suspicion):
            known.pop(node, None)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, node: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(node, None)

    async def _look_into(self, node: str) -> None:
        records = self._records.get(node)
        answer = await _ask_twice(self._ask, self._peers[node])
        if answer:
            return
        await asyncio.sleep(HEARSAY)
        if records is None or node not in self._records:
            return  # gone already
        is_cut_off = frozen = False
        if answer is None and len(self._doubters(node)) < DOUBTERS:
            is_cut_off = must_resign(await self._survey())
            frozen = not is_cut_off and await self._is_frozen(node, records)
        heard_of = self._records.get(node) != records
        doubters = self._doubters(node)  # others may doubt it by now
        if is_gone(answer, doubters, heard_of=heard_of, frozen=frozen):
            logger.info("node %s does not answer; dropping it", node)
        elif is_cut_off:
            logger.warning("This node cannot reach half of the nodes; stepping down as leader.")
            node = self._node
        else:
            return
        try:
            await self._give_up(node, answer is None)
        except RendezvousError as error:
            logger.debug("could not confirm that %s was dropped: %s", node, error)

    async def _is_frozen(self, node: str, records: int) -> bool:
        """Whether a node stays silent, at the store too; one that is cut off would doubt us."""
        await asyncio.sleep(self._again)
        if self._records.get(node) != records or self._node in self._suspicion.get(node, ()):
            return False
        return await self._ask(self._peers[node]) is None

    def _doubters(self, node: str) -> set[str]:
        return doubters_of(node, self._suspicion) | {self._node}

    async def _survey(self) -> list[bool | None]:
        """Ask some of the others whether they live."""
        others = [peer for node, peer in sorted(self._peers.items()) if peer and node != self._node]
        return await asyncio.gather(*map(self._ask, others[:SURVEYED]))
