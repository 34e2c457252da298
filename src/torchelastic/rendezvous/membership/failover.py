"""The state a node keeps of each world, so that it could host the store if its host were lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from torchelastic.records import replace
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.leader import ROLL_KEY
from torchelastic.rendezvous.majority import Roll
from torchelastic.rendezvous.store import Json, Store
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY, World, addresses_in


class Failover:
    """Collects what to hold of the newest world.

    Of a large world, only its failover candidates hold everything: the others do not need thousands
    of addresses. Of a small world, every node does, also a spare: it may be the only node left that
    has confirmed the world. It does not vote for a node with an older world, so then only the spare
    itself can become host.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._holding = FailoverState()
        self._digest = ""
        #: The newest world that is confirmed, as far as is known.
        self._confirmed = -1
        #: Set once this node has been a candidate.
        self.is_candidate = asyncio.Event()

    async def take(self, store: Store, world: World, summary: Json) -> FailoverState:
        """The state to hold of a world; fetches what its summary lacks, if needed."""
        parts: dict[str, Json] = {}
        roll: Json | None = None
        if self.lacks(world):
            listed, rolls = await asyncio.gather(store.get(PART_PREFIX), store.get(ROLL_KEY))
            parts = {k: item.value for k, item in listed.items.items() if world.owns(item.value)}
            roll = rolls.items[ROLL_KEY].value if ROLL_KEY in rolls.items else None
        return self.noted(world, summary, parts, roll)

    def lacks(self, world: World) -> bool:
        """Return whether this node has to hold the whole of a world, and does not know all of it
        yet."""
        return self._is_to_hold(world) and not self._knows(world)

    def _is_to_hold(self, world: World) -> bool:
        return self._node in world.candidates or world.part_count == 1

    def _knows(self, world: World) -> bool:
        return (world.generation, world.digest) == (self._holding.roll.generation, self._digest)

    def noted(
        self, world: World, summary: Json, parts: Mapping[str, Json], roll: Json | None
    ) -> FailoverState:
        """The state to hold of a world, with the parts and the roll of one that it `lacks`."""
        if self._knows(world):
            if self._holding.rows:
                rows = {**self._holding.rows, WORLD_KEY: summary}
                self._holding = replace(self._holding, rows=rows)
        elif self._is_to_hold(world):
            self.is_candidate.set()
            self._holding = self._whole(world, summary, parts, roll)
        else:
            self._holding = self._outline(world)
        self._digest = world.digest
        return self.confirmed(self._confirmed)

    def confirmed(self, generation: int) -> FailoverState:
        """The state to hold once a world is confirmed, which may be known before the world is."""
        self._confirmed = max(self._confirmed, generation)
        if self._holding.roll.generation == generation:
            self._holding = self._holding.confirmed()
        return self._holding

    def _outline(self, world: World) -> FailoverState:
        """The minimum: enough to vote, and to look for a host."""
        places = {node.node: node.peer for node in world.nodes}
        return FailoverState(
            roll=_roll(None, world, places),
            order=tuple(world.candidates),
            addresses=_known({**world.candidates, **places}),
        )

    def _whole(
        self, world: World, summary: Json, listed: Mapping[str, Json], roll: Json | None
    ) -> FailoverState:
        addresses = addresses_in(listed.values())
        if len(addresses) != world.count:
            return self._outline(world)  # a newer one is there already
        rows: dict[str, Json] = {WORLD_KEY: summary, **listed}
        if roll is not None:
            rows[ROLL_KEY] = roll
        return self._made(world, rows, addresses)

    def formed(self, world: World, beside: Mapping[str, Json]) -> FailoverState:
        """The state to hold of a world that this node forms; `beside` are its parts and its
        roll."""
        rows = {WORLD_KEY: world.summary(), **beside}
        parts = [value for key, value in beside.items() if key.startswith(PART_PREFIX)]
        self.is_candidate.set()
        self._holding = self._made(world, rows, addresses_in(parts))
        self._digest = world.digest
        return self._holding

    def _made(
        self, world: World, rows: Mapping[str, Json], addresses: Mapping[str, str]
    ) -> FailoverState:
        roll = rows.get(ROLL_KEY)
        return FailoverState(
            roll=_roll(roll, world, addresses),
            order=tuple(world.candidates),
            addresses=_known({**world.candidates, **addresses}),
            rows=rows,
        )


def _roll(stored: Json | None, world: World, nodes: Iterable[str]) -> Roll:
    return majority.from_json(
        stored, world.generation, nodes, world.host, witness=bool(world.witness)
    )


def _known(addresses: Mapping[str, str]) -> dict[str, str]:
    """The addresses, without nodes that cannot be reached."""
    return {node: peer for node, peer in addresses.items() if peer}
