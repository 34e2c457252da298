"""Which worlds a node acts on: none of those that have counted it as lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.agent.support import in_loop, place
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.rendezvous.membership.member_session import MemberRecord, MemberSession
from torchelastic.rendezvous.membership.node_driver import LogObserver
from torchelastic.rendezvous.store import Item
from torchelastic.rendezvous.world import Member, World


class Store:
    """Has the list of nodes of one world."""

    def __init__(self, world: World) -> None:
        self.lease_lost = asyncio.Event()
        [self._part] = world.parts().values()

    async def latest(self, key: str) -> Item:
        return Item(self._part, 1, 1)


async def seen(
    world: World, *, published: int, since: int, lease_lost: bool = False, takes_up: bool = True
) -> str:
    """The phase in which a node acts on a world; empty: it does not."""
    worlds: list[World] = []
    session = MemberSession(
        LaunchConfig(),
        "a",
        SystemClock(),
        observer=LogObserver(),
        background=lambda work, name: None,
        on_world=worlds.append,
        on_lease_lost=lambda: None,
    )
    session._backend = SimpleNamespace(
        hear_of=lambda addresses: None, takes_up=lambda generation: takes_up, term=0
    )
    session._membership = MemberRecord(Member(node="a", name="a", addr="a", nproc=2))
    session._membership.since = since
    store = Store(world)
    if lease_lost:
        store.lease_lost.set()
    await session._see_world(store, Item(world.summary(), published, published))
    return worlds[0].phase if worlds else ""


def world(phase: str = "running", nodes: str = "ab") -> World:
    made = World(generation=3, phase=phase, store="a:1")
    return made.with_nodes(place(name, rank) for rank, name in enumerate(nodes))


@pytest.mark.parametrize(
    ("shown", "facts", "phase"),
    [
        (world(), {"published": 9, "since": 5}, "running"),
        (world(), {"published": 4, "since": 5}, "over"),
        (world("pausing"), {"published": 4, "since": 5}, "over"),
        (world(nodes="bc"), {"published": 4, "since": 5}, "running"),
        (world("waiting"), {"published": 4, "since": 5}, "waiting"),
        (world("closed"), {"published": 4, "since": 5}, "closed"),
        (world(), {"published": 4, "since": 0}, "running"),  # at a new host
        (world(), {"published": 9, "since": 5, "lease_lost": True}, ""),
        (world("closed"), {"published": 9, "since": 5, "lease_lost": True}, "closed"),
        # Of an earlier host than the present one: a newer world follows, but of one that waits, or
        # is closed, it must hear.
        (world(), {"published": 9, "since": 5, "takes_up": False}, ""),
        (world("agreeing"), {"published": 9, "since": 5, "takes_up": False}, ""),
        (world("waiting"), {"published": 9, "since": 5, "takes_up": False}, "waiting"),
        (world("closed"), {"published": 9, "since": 5, "takes_up": False}, "closed"),
    ],
)
@in_loop
async def test_a_world_is_acted_on_by_who_is_a_member_since_before_it(shown, facts, phase):
    assert await seen(shown, **facts) == phase
