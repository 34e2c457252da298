"""Probe the other members of the job: which of them can this node reach?

A node probes them when it is to join a world, and when nodes of a world could not reach each other
(`World.probe`). Those that it cannot reach it probes again until it can, so a node is left out for
as long as a cut lasts, and no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from torchelastic.rendezvous import connectivity
from torchelastic.rendezvous.membership.suspicion import Ask
from torchelastic.rendezvous.store import Store
from torchelastic.rendezvous.world import MEMBER_PREFIX, Member, World

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


def _without_answer(peers: dict[str, str], answers: Iterable[bool | None]) -> dict[str, str]:
    return {
        node: peer
        for (node, peer), answer in zip(peers.items(), answers, strict=True)
        if not answer
    }
