"""A node in the job: its failover state, its lease, its member record, the worlds it acts on."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import FakeClock
from tests.unit.agent.cast import in_loop, place
from tests.unit.rendezvous.cast import connected, run, serving, soon, story
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.failover_state import Failover
from torchelastic.rendezvous.leader import ROLL_KEY
from torchelastic.rendezvous.membership.lease import HeldLease
from torchelastic.rendezvous.membership.member_session import (
    NEIGHBOURS,
    MemberRecord,
    MemberSession,
    _numbers,
)
from torchelastic.rendezvous.membership.node_driver import LogObserver
from torchelastic.rendezvous.store import Item, Listing
from torchelastic.rendezvous.world import Member, World

# --- failover -------------------------------------------------------------------------------------

# What a node keeps of a world, so that it could vote for the next host, or be it.


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


# --- lease ----------------------------------------------------------------------------------------

# When a lease is over, as its holder must see it.


def held(clock, *, seconds=15.0, standstill=3.0, sent=0.0) -> tuple[HeldLease, asyncio.Event]:
    lost = asyncio.Event()
    lost.set()  # as after the lease before
    lease = HeldLease(
        "1", seconds=seconds, standstill=standstill, sent=sent, clock=clock, lost=lost
    )
    assert not lost.is_set()
    return lease, lost


def let_run(lease: HeldLease, clock: FakeClock, seconds: float) -> bool:
    """Time goes by, and the loop runs all the time."""
    for _ in range(int(seconds)):
        clock.advance(1.0)
        lease.check()
    return lease.is_held


@story
async def test_lease_ends_counted_from_the_last_renewal_request():
    clock = FakeClock()
    lease, lost = held(clock)
    assert let_run(lease, clock, 14)
    lease.renewed(sent=2.0)
    lease.renewed(sent=1.0)  # an answer that came late takes nothing back
    assert let_run(lease, clock, 2)
    assert not let_run(lease, clock, 1)
    assert lost.is_set()


@story
async def test_lease_ends_at_once_after_a_freeze_of_the_process():
    clock = FakeClock()
    lease, lost = held(clock)
    assert let_run(lease, clock, 4)
    clock.advance(2.9)
    assert lease.check()
    clock.advance(3.0)
    assert not lease.check()
    assert lost.is_set()


@story
async def test_an_ended_lease_stays_ended_and_one_given_back_is_not_lost():
    clock = FakeClock()
    lease, lost = held(clock)
    lease.end()
    lease.renewed(sent=9.0)
    assert not lease.check()
    lease, lost = held(clock)
    lease.give_back()
    clock.advance(20.0)
    assert not lease.check()
    assert not lost.is_set()


@story
async def test_lease_ends_without_being_checked():
    clock = SystemClock()
    _, lost = held(clock, seconds=0.05, standstill=9.0, sent=clock.now())
    await soon(lost.is_set, "the lease is over")
    held(clock, seconds=0.0, sent=clock.now())[0].give_back()


def test_a_loop_that_runs_does_not_stand_still():
    class Looked(FakeClock):
        times = 0

        def now(self):
            self.times += 1
            return super().now()

    async def story():
        clock = Looked()
        lease, _ = held(clock, seconds=60.0, standstill=0.1)
        for _ in range(5):
            clock.advance(0.09)
            before = clock.times
            await soon(lambda before=before: clock.times > before, "the timer has run out")
        assert lease.is_held
        lease.give_back()

    run(story())


@story
async def test_the_lease_is_renewed_until_the_store_is_lost_or_it_expires():
    lease, _ = held(FakeClock())
    answers = [True, RendezvousRefused("not now"), True, RendezvousLost("gone")]

    async def renew():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await lease.keep(renew, every=0.0)
    assert answers == []
    lease.end()
    await lease.keep(renew, every=0.0)


# --- member record --------------------------------------------------------------------------------

# A node's record in a real store: its name, and what is put when.


def member(node: str) -> Member:
    return Member(node=node, name="", addr="10.0.0.1", nproc=2)


async def record(store, node: str) -> Member:
    return Member.from_json((await store.get(f"member/{node}")).items[f"member/{node}"].value)


@in_loop
async def test_agents_of_one_host_are_told_apart_by_numbers():
    async with serving() as server:
        names = []
        async with contextlib.AsyncExitStack() as stack:
            for node in "abc":
                store = await stack.enter_async_context(connected(server.port))
                await store.open_lease(60.0)
                membership = MemberRecord(member(node))
                await membership.enlist(store, "host")
                names.append(membership.member.name)
                assert (await record(store, node)).name == names[-1]
        assert names == ["host", "host-2", "host-3"]


@in_loop
async def test_agents_of_one_host_that_join_again_keep_their_names():
    first, second = (MemberRecord(member(node)) for node in "ab")
    async with serving() as server:
        for order in ((first, second), (second, first)):
            async with contextlib.AsyncExitStack() as stack:  # its end is that of the leases
                for membership in order:
                    store = await stack.enter_async_context(connected(server.port))
                    await store.open_lease(60.0)
                    await membership.enlist(store, "host")
            await soon(lambda: server.rows("") == [], "the leases have ended")
            assert (first.member.name, second.member.name) == ("host", "host-2")


def test_the_last_of_thousands_of_one_host_does_not_try_every_number():
    tries = list(islice(_numbers(), NEIGHBOURS + 4))
    assert tries[:NEIGHBOURS] == list(range(1, NEIGHBOURS + 1))
    ends = [NEIGHBOURS**power for power in range(1, 6)]
    for number, start, end in zip(tries[NEIGHBOURS:], ends[:-1], ends[1:], strict=True):
        assert start < number <= end


@in_loop
async def test_a_record_is_put_once_what_it_says_is_kept():
    """A change in the meantime is put after that, by a record of its own."""
    written = asyncio.Event()
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        membership = MemberRecord(member("a"))
        enlisting = asyncio.create_task(membership.enlist(store, "host", written.wait))
        for _ in range(3):
            await store.keep_alive()
            membership.update(gone=1)
        assert server.rows("") == []
        written.set()
        await enlisting
        assert (await record(store, "a")).gone == -1
        written.clear()
        running = asyncio.create_task(membership.run(store, written.wait))
        await store.keep_alive()
        assert (await record(store, "a")).gone == -1
        written.set()
        await membership.flush(store)
        assert (await record(store, "a")).gone == 1
        running.cancel()
        await asyncio.wait({running})


@in_loop
async def test_a_record_is_put_when_it_differs_from_what_the_store_has():
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        membership = MemberRecord(member("a"))
        await membership.enlist(store, "host")
        running = asyncio.create_task(membership.run(store))
        before = (await store.get("")).revision
        membership.update(ready=False)
        await membership.flush(store)
        assert (await store.get("")).revision == before
        membership.update(ready=True)
        await membership.flush(store)
        assert (await record(store, "a")).ready
        membership.unsaid()
        await membership.flush(store)
        assert (await store.get("")).revision == before + 2
        membership.mention(accepted=3)
        membership.update(gone=2)
        await membership.flush(store)
        said = await record(store, "a")
        assert (said.accepted, said.gone) == (3, 2)
        membership.mention(accepted=4)
        while (await record(store, "a")).accepted != 4:
            await asyncio.sleep(0.01)
        running.cancel()
        await soon(running.done, "the record is put no more")


# --- member session -------------------------------------------------------------------------------

# Which worlds a node acts on: none of those that have counted it as lost.


class SeenStore:
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
    store = SeenStore(world)
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
