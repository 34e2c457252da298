"""Check suspected agents, and probe the others: with etcd, which is slow to notice their end.

Neighbours in the ring suspect an agent whose connection ended or fell silent. The leader asks it:

    it answers    nothing happens; if it does not answer its neighbours, they say so after a lease,
                  and the world ends (`connectivity.silent_pairs`)
    refused       nothing listens at its port: its agent is dead, unless it writes its record
                  again, because a firewall refuses in its name. `decide` continues without it
    silence       it is frozen or cut off, on an unknown side: no membership ends by that

Whoever suspects the leader asks it, too, and leads in its place if it is dead, or has not ended a
world in which nodes fall silent.

A node probes all other members when it is to join a world, and when nodes of a world could not
reach each other (`World.probe`). Those that it cannot reach it probes again until it can, so a node
is left out for as long as a cut lasts, and no longer. With the embedded store, only a node that is
held out because its workers could not connect to another node probes that one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from torchelastic.rendezvous import connectivity
from torchelastic.rendezvous.store import Json, Store
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member, World
from torchelastic.side_tasks import TaskSet

logger = logging.getLogger(__name__)

#: Seconds in which news of an agent that does not answer may still come through the store.
STORE_DELAY = 0.02
#: Seconds before a suspected agent that has answered, or may have, is asked again.
ASK_AGAIN = 0.5

#: Asks the agent at an address: True if it lives, False if nothing listens, None if unknown.
Ask = Callable[[str], Awaitable[bool | None]]


async def replace_leader(
    store: Store,
    mine: Json,
    doubted: Collection[str],
    ask: Ask,
    *,
    is_overdue: Callable[[], bool],
    every: float,
) -> str:
    """Take over from a leader that is dead or does nothing. Returns its node if it is dead and this
    node leads now, else "".

    `mine` is the leader key of this node. The leader does nothing if `is_overdue` says so: it has
    not ended a world in which nodes fall silent. Only its leadership ends, not its membership.
    """
    first = None
    while True:
        leader = (await store.get(LEADER_KEY)).items.get(LEADER_KEY)
        if leader is None or first not in (None, leader.modified):
            return ""
        first = leader.modified
        node = leader.value["node"]
        is_dead = node in doubted and await _is_dead(store, node, ask)
        if is_dead or is_overdue():
            won = await store.compare_and_set(LEADER_KEY, mine, expected=first, leased=True)
            if won is not None:
                logger.info("the leader, %s, does not respond: this node leads now", node)
            return node if won is not None and is_dead else ""
        await asyncio.sleep(every)


async def _is_dead(store: Store, node: str, ask: Ask) -> bool:
    """Return whether nothing listens at a member's port, and it has not written its record."""
    key = MEMBER_PREFIX + node
    before = (await store.get(key)).items.get(key)
    if before is None or await ask(Member.from_json(before.value).peer) is not False:
        return False
    await asyncio.sleep(STORE_DELAY)
    return (await store.get(key)).items.get(key) == before


class Suspicion:
    """The suspicions that the present leader looks into."""

    def __init__(self, ask: Ask, on_change: Callable[[], None]) -> None:
        """`on_change` is called when `refused` has changed by itself."""
        self._ask = ask
        self._on_change = on_change
        #: Members whose machines refuse connections, and those that have spoken since.
        self.refused: set[str] = set()
        self.contested: set[str] = set()
        #: How often each node has put its record, as seen here.
        self._records: dict[str, int] = {}
        self._peers: dict[str, str] = {}
        self._doubts: dict[str, tuple[str, ...]] = {}
        #: Named by the nodes they look into.
        self._asking = TaskSet()

    def heard(self, member: Member) -> None:
        """Note that a member has written its record."""
        node = member.node
        self._records[node] = self._records.get(node, 0) + 1
        self._peers[node] = member.peer
        self._doubts[node] = member.doubts
        if node in self.refused and self._records[node] > 1:
            self.refused.discard(node)
            self.contested.add(node)
        # Check a node now that was suspected before it joined again: no report will repeat it.
        for other in (*member.doubts, *([node] if self._is_doubted(node) else [])):
            if self._peers.get(other) and other not in {one.get_name() for one in self._asking}:
                self._asking.start(self._look_into(other), other)

    def _is_doubted(self, node: str) -> bool:
        return any(node in doubted for doubted in self._doubts.values())

    def lost(self, node: str) -> None:
        """Note that a member is gone."""
        for known in (self._records, self._peers, self._doubts):
            known.pop(node, None)
        self.refused.discard(node)
        self.contested.discard(node)

    async def close(self) -> None:
        """End and forget everything: another node leads."""
        await self._asking.close()
        for node in list(self._records):
            self.lost(node)

    async def _look_into(self, node: str) -> None:
        """Ask a node for as long as others doubt it, until it refuses the connection."""
        while self._is_doubted(node) and (peer := self._peers.get(node)):
            records = self._records.get(node)
            if await self._ask(peer) is not False:
                await asyncio.sleep(ASK_AGAIN)
                continue
            await asyncio.sleep(STORE_DELAY)
            if records is not None and self._records.get(node) == records:
                logger.info("node %s refuses connections", node)
                self.refused.add(node)
                self._on_change()
                return


#: Seconds between two probes of the members that could not be reached.
PROBE_AGAIN = 1.0


class Prober:
    """Probes the others when a world asks for it, and says which it cannot reach."""

    def __init__(self, node: str, ask: Ask, say: Callable[[int, tuple[str, ...]], None]) -> None:
        """`say` receives the `World.probe`, and the members that this node cannot reach."""
        self._node = node
        self._ask = ask
        self._say = say
        #: The probe that this node has to make, and the last that it has made.
        self._wanted = self._done = -1
        self._unreached: tuple[str, ...] = ()
        self._changed = asyncio.Event()

    def see(self, world: World) -> None:
        """Note a world: nodes outside it probe the others before they join, and its own nodes when
        its end shows that some cannot reach each other."""
        if not world.count or world.phase == "closed":
            return
        is_outside = world.place(self._node) is None
        if (is_outside or world.probe > world.generation) and world.probe > self._wanted:
            self._wanted = world.probe
            self._changed.set()

    def forget(self) -> None:
        """Probe all again: this node was away."""
        self._done, self._unreached = -1, ()
        self._changed.set()

    async def run(self, store: Store) -> None:
        """Probe as needed for as long as the lease lasts."""
        while True:
            if not self._unreached:
                await self._changed.wait()
            self._changed.clear()
            wanted, is_new = self._wanted, self._wanted > self._done
            if is_new or self._unreached:
                listing = await store.get(MEMBER_PREFIX)
                members = [Member.from_json(item.value) for item in listing.items.values()]
                peers = {member.node: member.peer for member in members if member.peer}
                nodes = connectivity.to_probe(peers) if is_new else self._unreached
                unreached = await self._unreachable(
                    {node: peers[node] for node in nodes if node in peers and node != self._node}
                )
                if is_new or unreached != self._unreached:
                    self._done, self._unreached = wanted, unreached
                    self._say(wanted, unreached)
            if self._unreached and not self._changed.is_set():
                await asyncio.sleep(PROBE_AGAIN)

    async def _unreachable(self, peers: dict[str, str]) -> tuple[str, ...]:
        """Ask these agents, each twice: a machine may be busy."""
        for _ in range(2):
            answers = await asyncio.gather(*map(self._ask, peers.values()))
            peers = _without_answer(peers, answers)
        return tuple(sorted(peers))


class RivalProber:
    """With the embedded store: probes the nodes that this one could not connect to, while it is
    held out for that, so that the hold ends when they can be reached."""

    def __init__(self, node: str, ask: Ask, say: Callable[[tuple[str, ...]], None]) -> None:
        """`say` receives the rivals that this node cannot reach."""
        self._node = node
        self._ask = ask
        self._say = say
        self._rivals: frozenset[str] = frozenset()
        self._unreached: tuple[str, ...] = ()
        self._changed = asyncio.Event()

    def see(self, world: World) -> None:
        """Note a world, and because of which nodes it holds this one out."""
        rivals = frozenset(one.other for one in world.held if one.node == self._node and one.other)
        if rivals != self._rivals:
            self._rivals = rivals
            self._changed.set()

    def forget(self) -> None:
        """Probe again: this node was away."""
        self._unreached = ()

    async def run(self, store: Store) -> None:
        """Probe the rivals, as long as there are some and the lease lasts."""
        while True:
            self._changed.clear()
            unreached: tuple[str, ...] = ()
            if self._rivals:
                listing = await store.get(MEMBER_PREFIX)
                members = [Member.from_json(item.value) for item in listing.items.values()]
                peers = {m.node: m.peer for m in members if m.node in self._rivals and m.peer}
                answers = await asyncio.gather(*map(self._ask, peers.values()))
                unreached = tuple(sorted(_without_answer(peers, answers)))
            if unreached != self._unreached:
                self._unreached = unreached
                self._say(unreached)
            if not self._rivals:
                await self._changed.wait()
            elif not self._changed.is_set():
                await asyncio.sleep(PROBE_AGAIN)


def _without_answer(peers: dict[str, str], answers: Iterable[bool | None]) -> dict[str, str]:
    return {
        node: peer
        for (node, peer), answer in zip(peers.items(), answers, strict=True)
        if not answer
    }
