"""What a node keeps of a world, so that it could vote for the next host, or be it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.agent.support import place
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.leader import ROLL_KEY
from torchelastic.rendezvous.membership.failover import Failover
from torchelastic.rendezvous.store import Item, Listing
from torchelastic.rendezvous.world import World


class Store:
    """The rows of one world."""

    def __init__(self, world: World) -> None:
        roll = majority.from_json(None, world.generation, world.members, world.host)
        self._rows: dict[str, Any] = {**world.parts(), ROLL_KEY: majority.to_json(roll)}

    async def get(self, prefix: str) -> Listing:
        found = {key: value for key, value in self._rows.items() if key.startswith(prefix)}
        return Listing(1, {key: Item(value, 1, 1) for key, value in found.items()})


@pytest.mark.parametrize("node", ["a", "b", "c", "d"])
def test_the_host_has_a_vote_and_is_asked_in_the_world_or_not(node):
    """a hosts and does not train, b and c do; d is a spare, and could host as well: it may be the
    only one left that knows of this world."""
    made = World(generation=3, phase="running", host="a", candidates={"a": "a:1"})
    world = made.with_nodes(place(name, rank, peer=f"{name}:1") for rank, name in enumerate("bc"))
    holding = asyncio.run(Failover(node).take(Store(world), world, world.summary()))
    assert holding.roll.latest.nodes == set("abc")
    assert holding.addresses == {"a": "a:1", "b": "b:1", "c": "c:1"}
    assert holding.rows
    assert holding.order == ("b", "c", "a")


def test_failover_of_a_large_world_is_held_by_its_candidates_only():
    made = World(generation=3, phase="running", host="n0")
    names = [f"n{number}" for number in range(40)]
    world = made.with_nodes(place(name, rank, peer=f"{name}:1") for rank, name in enumerate(names))
    for node in ("spare", *names):
        holding = asyncio.run(Failover(node).take(Store(world), world, world.summary()))
        assert bool(holding.rows) == (node in world.candidates)


def test_failover_of_a_formed_world_is_confirmed_when_told():
    failover = Failover("a")
    world = World(generation=0, phase="running", host="a").with_nodes([place("a", 0)])
    failover.formed(world, world.parts())
    assert failover.is_candidate.is_set()
