"""The leader over a real embedded store: campaign, publication, fencing."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from tests.unit.rendezvous.cast import connected, serving, story
from torchelastic.clock import SystemClock
from torchelastic.rendezvous.embedded.failover_state import Failover
from torchelastic.rendezvous.job_settings import JobSettings
from torchelastic.rendezvous.leader import CHECKPOINT_QUIET_POLLS, ROLL_KEY, CheckpointPath, Leader
from torchelastic.rendezvous.majority import Electorate, Roll
from torchelastic.rendezvous.round_state import RoundRules
from torchelastic.rendezvous.store import Item, Listing
from torchelastic.rendezvous.world import LEADER_KEY, PART_PREFIX, WORLD_KEY, Member, World

DEADLINE = 10.0


class Told:
    """An observer that remembers."""

    def __init__(self):
        self.leads = asyncio.Event()
        self.decisions = []
        self.lost = []
        self.said = []
        self.has_said = asyncio.Event()

    def became_leader(self):
        self.leads.set()

    def node_joined(self, member):
        pass

    def node_lost(self, name, reason):
        self.lost.append(name)

    def node_leaving(self, member):
        pass

    def decided(self, world, kind):
        self.decisions.append((world.phase, kind))

    def say(self, sentence):
        self.said.append(sentence)
        self.has_said.set()


class Node:
    """A member that stops at once whenever it is told to."""

    def __init__(self, store, name, rules, agreement=None):
        self.store, self.name = store, name
        self.told = Told()
        self.member = Member(
            node=name, name=name, addr=name, nproc=1, ready=True, store=f"{name}:1"
        )
        self.leader = Leader(store, name, rules, SystemClock(), self.told, agreement=agreement)
        self.leading = asyncio.create_task(self.leader.run())

    async def say(self, **changes):
        self.member = replace(self.member, **changes)
        await self.store.put(f"member/{self.name}", self.member.to_json(), leased=True)

    async def world(self, generation, phase="running"):
        """Wait for a world; answer everything that is over on the way there."""

        async def look():
            async with aclosing(self.store.watch(WORLD_KEY, after=0)) as changes:
                async for change in changes:
                    world = World.from_json(change.item.value)
                    if (world.generation, world.phase) == (generation, phase):
                        return await self.whole(world)
            raise AssertionError("the watch ended")

        return await asyncio.wait_for(look(), DEADLINE)

    async def whole(self, world):
        """The world with all of its parts."""
        listing = await self.store.get(PART_PREFIX)
        parts = [item.value for item in listing.items.values()]
        return world.with_parts([part for part in parts if world.owns(part)])

    async def close(self):
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)
        await self.store.close()


@asynccontextmanager
async def cluster(rules, *names, agreement=None):
    async with serving() as server, AsyncExitStack() as stack:
        nodes = []
        for name in names:
            store = await stack.enter_async_context(connected(server.port))
            await store.open_lease(5.0)
            nodes.append(Node(store, name, rules, agreement))
            stack.push_async_callback(nodes[-1].close)
        yield nodes


@story
async def test_one_leads_and_its_successor_takes_the_world_up():
    # All three begin together, however long they take to come.
    rules = RoundRules(min_nodes=1, max_nodes=3, settle=60.0)
    async with cluster(rules, "a", "b", "c") as (a, b, c):
        await asyncio.wait_for(a.told.leads.wait(), DEADLINE)
        for node in (a, b, c):
            await node.say()
        first = await b.world(0)
        assert [node.name for node in first.nodes] == ["a", "b", "c"]
        assert not b.told.leads.is_set()

        await a.close()
        leads = [asyncio.create_task(node.told.leads.wait()) for node in (b, c)]
        done, rest = await asyncio.wait(
            leads, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED
        )
        assert len(done) == 1
        for task in rest:
            task.cancel()
        await b.world(0, "over")
        await b.say(gone=0, store="b:2")
        await c.say(gone=0, store="c:2")
        second = await c.world(1)
        assert [node.name for node in second.nodes] == ["b", "c"]
        assert second.store == "b:2"


@story
async def test_a_leader_shows_its_terms_and_forms_no_world_with_a_node_of_others():
    rules = RoundRules(min_nodes=2, max_nodes=2)
    ours, theirs = JobSettings({"--nnodes": "2"}), JobSettings({"--nnodes": "3"})
    async with cluster(rules, "a", "b", "c", agreement=ours) as (a, b, c):
        await asyncio.wait_for(a.told.leads.wait(), DEADLINE)
        shown = await a.store.latest(LEADER_KEY)
        assert shown.value == {"node": "a", **ours.to_json()}
        await b.say(agreement=theirs.digest)
        await a.say(agreement=ours.digest)
        await c.say(agreement=ours.digest)
        world = await a.world(0)
        assert {node.name for node in world.nodes} == {"a", "c"}


@story
async def test_a_host_keeps_a_world_before_anybody_sees_it():
    """With its nodes and its roll, once for all of its phases; it could host it again."""
    kept, failover = [], Failover("a")
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)

        async def keep(world, rows):
            listing = await store.get("")
            kept.append((WORLD_KEY in listing.items, world.count, failover.formed(world, rows)))

        rules = RoundRules(min_nodes=1, max_nodes=1)
        leader = Leader(store, "a", rules, SystemClock(), Told(), term=1, keep=keep)
        member = Member(node="a", name="a", addr="a", nproc=1, ready=True, store="a:1", peer="a:2")
        await store.put("member/a", member.to_json(), leased=True)
        leading = asyncio.create_task(leader.run())
        await asyncio.wait_for(_world_of(store, "running"), DEADLINE)
        await store.put("member/a", replace(member, done=0).to_json(), leased=True)
        await asyncio.wait_for(leading, DEADLINE)
        listing = await store.get("")
    ((is_shown, count, held),) = kept
    assert (is_shown, count) == (False, 1)
    assert held.roll == Roll(0, Electorate(frozenset("a"), "a"))
    assert held.addresses == {"a": "a:2"}
    stored = {key: item.value for key, item in listing.items.items()}
    parts = {key for key in stored if key.startswith(PART_PREFIX)}
    assert held.rows.keys() == {WORLD_KEY, ROLL_KEY, *parts}
    for key in (ROLL_KEY, *parts):
        assert json.loads(json.dumps(held.rows[key])) == stored[key]


async def _world_of(store, phase):
    async with aclosing(store.watch(WORLD_KEY, after=0)) as changes:
        async for change in changes:
            if change.item.value["phase"] == phase:
                return


@story
async def test_a_leader_that_was_overtaken_publishes_nothing():
    rules = RoundRules(min_nodes=1, max_nodes=2, settle=0.05)
    async with cluster(rules, "a") as (a,):
        await asyncio.wait_for(a.told.leads.wait(), DEADLINE)
        await a.say()
        await a.world(0)
        usurped = replace(await a.world(0), generation=9, reason="another leader's")
        await a.store.compare_and_set(
            WORLD_KEY,
            usurped.summary(),
            expected=(await a.store.get(WORLD_KEY)).items[WORLD_KEY].modified,
            beside=usurped.parts(),
        )
        await a.say(done=0)  # of a generation that is history: its end must not be published
        await a.say(done=9)
        closed = await a.world(9, "closed")
        assert closed.generation == 9
        assert a.told.decisions == [("waiting", None), ("running", None), ("closed", None)]


@story
async def test_a_slow_node_is_replaced_when_a_spare_is_there_and_else_that_is_reported_once():
    async with cluster(RoundRules(min_nodes=2, max_nodes=2), "a", "b", "c") as (a, b, c):
        await asyncio.wait_for(a.told.leads.wait(), DEADLINE)
        await a.say()
        await b.say()
        await b.world(0)
        a.leader.replace_slow(-1, {"b"})  # of a world that is history
        a.leader.replace_slow(0, {"b"})
        await asyncio.wait_for(a.told.has_said.wait(), DEADLINE)
        a.leader.replace_slow(0, {"b"})
        await c.say()
        over = await b.world(0, "over")
        assert over.reason == "c replaces slow b"
        assert a.told.said == ["no spare node can replace the slow b"]
        await a.say(gone=0, store="a:2")
        await b.say(gone=0, store="b:2")
        assert [node.name for node in (await c.world(1)).nodes] == ["a", "c"]


def test_a_checkpoint_counts_once_it_is_written(tmp_path):
    directory = tmp_path / "checkpoints"
    (directory / "old").mkdir(parents=True)
    (directory / "old" / "weights").write_text("old")
    paths = [
        CheckpointPath(str(path))
        for path in (directory / "last.pt", directory, tmp_path / "*" / "last.*")
    ]
    assert not any(path.written() for path in paths)
    with (directory / "last.pt").open("w") as file:
        for _ in range(2 * CHECKPOINT_QUIET_POLLS):
            print("weights", file=file, flush=True)
            assert not any(path.written() for path in paths)
    looks = [[path.written() for path in paths] for _ in range(CHECKPOINT_QUIET_POLLS)]
    assert all(looks[-1])


def test_an_old_checkpoint_that_goes_is_no_new_one(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(0, 1 if name == "old" else 2))
    path = CheckpointPath(str(tmp_path))
    (tmp_path / "old").unlink()
    assert not any(path.written() for _ in range(2 * CHECKPOINT_QUIET_POLLS))


def test_a_host_that_takes_a_world_over_knows_when_it_may_go_on():
    """Not before a lease is over: a node that trained alone may still make steps."""
    world = World(generation=3, phase="running", host="a", term=1).with_nodes([])
    rows = {WORLD_KEY: world.summary(), **world.parts()}
    listing = Listing(1, {key: Item(value, 1, 1) for key, value in rows.items()})
    rules = RoundRules(min_nodes=1, max_nodes=2)

    async def made() -> Leader:
        return Leader(None, "a", rules, SystemClock(), Told(), term=5, may_begin_at=7.0)

    assert asyncio.run(made())._state_from(listing).may_begin_at == 7.0
