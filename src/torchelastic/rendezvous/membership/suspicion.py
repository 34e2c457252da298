"""Suspicion of an agent, where the store would be slow to notice its end.

Neighbours in the ring suspect an agent whose connection ended or fell silent. The leader asks it.
If it does not answer, the result depends on how:

    refused    nothing listens at its port: it is dropped, unless it has just written its record
               again because its own connections ended as well; a firewall refuses in its name
    silence    it is frozen or cut off, on an unknown side: it is dropped if a second node suspects
               it too, or it is silent at the store as well; else its lease decides. Contact with
               the store alone does not help the others, who need it for every step

So a node that is cut off from all others, but not from the store, drops none; the others drop it.
If the leader is that node, it notices that many do not answer, and steps down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.store import Item, Store
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member
from torchelastic.side_tasks import TaskSet

logger = logging.getLogger(__name__)

#: Seconds in which news of an agent that does not answer may still come through the store.
STORE_DELAY = 0.02
#: How many must find an agent silent.
DOUBTERS = 2
#: How many members a leader asks that finds one silent alone.
SURVEYED = 8

#: Asks the agent at an address: True if it lives, False if nothing listens, None if unknown.
Ask = Callable[[str], Awaitable[bool | None]]
#: Gives a node up, and says whether it is one that others could not reach.
GiveUp = Callable[[str, bool], Awaitable[None]]


def is_gone(
    answer: bool | None, doubters: Collection[str], *, heard_of: bool, frozen: bool = False
) -> bool:
    """Return whether an agent that was asked is dropped.

    `heard_of`: it has written its record since. `frozen`: it has been silent everywhere for a
    while, and does not suspect its suspecters, as a node that is cut off would.
    """
    if answer is None:
        return frozen or len(doubters) >= DOUBTERS
    return not answer and not heard_of


async def _ask_twice(ask: Ask, address: str) -> bool | None:
    """Ask again after silence: the machine may be busy."""
    answer = await ask(address)
    return await ask(address) if answer is None else answer


def must_resign(answers: Collection[bool | None]) -> bool:
    """Return whether a leader with these answers cannot reach half of the members.

    With two nodes the lease decides.
    """
    members, silent = len(answers) + 1, sum(answer is None for answer in answers)
    return members > DOUBTERS and 2 * silent >= members


def doubters_of(node: str, doubts: Mapping[str, Collection[str]]) -> set[str]:
    """The nodes that suspect a node, given what each node suspects."""
    return {other for other, doubted in doubts.items() if node in doubted}


async def give_up_leader(
    store: Store, node: str, doubted: Collection[str], ask: Ask, *, again: float
) -> None:
    """As a member that suspects the leader itself: ask it, and drop it if it is gone; no other node
    would.

    Asks every `again` seconds. Ends when another leads, or the leader is no longer `doubted`.
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
        await asyncio.sleep(STORE_DELAY)
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
    """The suspicions that the present leader looks into."""

    def __init__(self, node: str, ask: Ask, give_up: GiveUp, *, again: float) -> None:
        """`node` is the leader itself, which drops itself if it must step down. A node that only
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
        #: Named by the nodes they look into.
        self._asking = TaskSet()

    def heard(self, member: Member) -> None:
        """Note that a member has written its record."""
        self._records[member.node] = self._records.get(member.node, 0) + 1
        self._peers[member.node] = member.peer
        self._suspicion[member.node] = member.doubts
        # Check a node now that was suspected before it joined again: no report will repeat it.
        again = [member.node] if doubters_of(member.node, self._suspicion) else []
        for node in (*member.doubts, *again):
            if self._peers.get(node) and node not in {one.get_name() for one in self._asking}:
                self._asking.start(self._look_into(node), node)

    def lost(self, node: str) -> None:
        """Note that a member is gone."""
        for known in (self._records, self._peers, self._suspicion):
            known.pop(node, None)

    async def close(self) -> None:
        await self._asking.close()

    async def _look_into(self, node: str) -> None:
        records = self._records.get(node)
        answer = await _ask_twice(self._ask, self._peers[node])
        if answer:
            return
        await asyncio.sleep(STORE_DELAY)
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
        """Return whether a node stays silent, also at the store; one that is cut off would suspect
        us."""
        await asyncio.sleep(self._again)
        if self._records.get(node) != records or self._node in self._suspicion.get(node, ()):
            return False
        return await self._ask(self._peers[node]) is None

    def _doubters(self, node: str) -> set[str]:
        return doubters_of(node, self._suspicion) | {self._node}

    async def _survey(self) -> list[bool | None]:
        """Ask some of the others whether they are alive."""
        others = [peer for node, peer in sorted(self._peers.items()) if peer and node != self._node]
        return await asyncio.gather(*map(self._ask, others[:SURVEYED]))
