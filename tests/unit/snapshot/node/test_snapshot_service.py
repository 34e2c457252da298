"""What an agent answers about snapshots, and to whom it brings copies."""

import asyncio
import contextlib
import dataclasses
import doctest
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agent.support import in_loop, place
from torchelastic.rendezvous.world import Base, World
from torchelastic.snapshot import layout, messages
from torchelastic.snapshot.layout import SHARED, Memory, own
from torchelastic.snapshot.node import snapshot_service
from torchelastic.snapshot.node import snapshot_service as module
from torchelastic.snapshot.node.snapshot_service import Snapshots, chosen_holders, holders
from torchelastic.system import memory_limit
from torchelastic.system.memory_limit import Limit
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS
from torchelastic.transport.listener import Listener


def world(*names, **peers):
    return World(generation=3, phase="running").with_nodes(
        place(name, at, 1, first_rank=at, peer=peers.get(name, f"{name}:1"))
        for at, name in enumerate(names)
    )


def part(whole, *names):
    """The world as an agent has it that knows these nodes only."""
    known = tuple(item for item in whole.nodes if item.node in names)
    return dataclasses.replace(whole, nodes=known)


@pytest.mark.parametrize(
    ("seen", "replicas", "chosen"),
    [
        (world("a", "b", "c"), 1, ["c"]),
        (world("a", "b", "c"), 2, ["c", "a"]),
        (world("a", "b", "c"), 9, ["c", "a"]),
        (world("a", "b", "c"), 0, []),
        (world("b"), 1, []),
        (world("a", "c"), 1, []),  # it has no place itself
        (world("a", "b", "c", c=""), 1, ["a"]),  # nobody reaches the other
        (part(world("a", "b", "c", "d"), "a", "b"), 1, ["a"]),
        (part(world("a", "b", "c", "d"), "b"), 1, ["a"]),  # alone in its part
    ],
)
def test_service_places_pieces_on_the_next_nodes(seen, replicas, chosen):
    assert chosen_holders(seen, "b", replicas) == [(name, f"{name}:1") for name in chosen]


class Agent:
    """Snapshots of one node, with a reception, as a worker sees them."""

    def __init__(self, name, replicas=1):
        self.name = name
        self.said = []
        self.bases = []
        self.snapshots = Snapshots(
            name,
            "job",
            replicas=replicas,
            bandwidth=0.0,
            say=self.said.append,
            on_base=self.bases.append,
        )
        self.listener = Listener("job")
        self.memories = {}

    async def listen(self):
        port = await self.listener.listen(bind_endpoint("127.0.0.1", 0))
        self.peer = f"127.0.0.1:{port}"
        backend = SimpleNamespace(serve=self.listener.serve, credentials=ANONYMOUS, peer=self.peer)
        self.snapshots.open(backend)

    async def ask(self, request):
        """The answer, and the memory that came with it."""
        answered = asyncio.get_running_loop().create_future()

        def answer(said, descriptors):
            taken = [os.dup(descriptor) for descriptor in descriptors]
            answered.set_result((messages.from_json(said), taken))

        self.snapshots.heard(messages.to_json(request), answer)
        said, taken = await answered
        made = None
        for descriptor in taken:
            made = Memory(descriptor)
            os.close(descriptor)
        return said, made

    async def write(self, piece, version):
        if piece not in self.memories:
            _, self.memories[piece] = await self.ask(messages.Room(1, piece, 1000, 100))
        made = self.memories[piece]
        made.begin(version)[:5] = b"bytes"
        made.seal(version, b"{}", 5, layout.checksum(b"bytes"))
        self.tell(messages.Sealed(piece, version))

    def tell(self, message):
        self.snapshots.heard(messages.to_json(message), None)

    async def held(self):
        said, _ = await self.ask(messages.Inventory(1))
        return [(item.piece, item.version, item.replica) for item in said.holdings]

    async def holds(self, *wanted):
        while wanted not in await self.held():
            await asyncio.sleep(0.005)

    async def replicates(self, version):
        while self.memories[own(0)].replicated() != version:
            await asyncio.sleep(0.005)

    async def close(self):
        for memory in self.memories.values():
            memory.close()
        await self.snapshots.close()
        await self.listener.close()


@contextlib.asynccontextmanager
async def agents(*names, **options):
    made = [Agent(name, **options) for name in names]
    for agent in made:
        await agent.listen()
    try:
        yield made
    finally:
        for agent in made:
            await agent.close()


def in_one_world(*agents, generation=3):
    seen = world(*[agent.name for agent in agents], **{item.name: item.peer for item in agents})
    seen = dataclasses.replace(seen, generation=generation)
    for agent in agents:
        agent.snapshots.turn_to(seen)


@in_loop
async def test_service_answers_requests_of_workers():
    async with agents("a") as (a,):
        for nonsense in ({"type": "snapshot.open"}, {"type": "snapshot.juggle"}):
            a.snapshots.heard(nonsense, None)
        assert await a.held() == []
        await a.write(SHARED, (0, 1))
        said, made = await a.ask(messages.Open(7, SHARED, (0, 1)))
        assert said == messages.Opened(7)
        assert made.freshest().data == b"bytes"
        made.close()
        said, made = await a.ask(messages.Open(8, SHARED, (0, 2)))
        sentence = "This node does not hold 'shared' of generation 0, step 2."
        assert (said, made) == (messages.Refused(8, sentence), None)
        said, _ = await a.ask(messages.Room(9, "mine", 10, 10))
        assert "is not a piece" in said.sentence
        said, _ = await a.ask(messages.Inventory(10))
        assert (said.peer, said.node) == (a.peer, "a")


@in_loop
async def test_a_damaged_version_is_not_offered_again_and_a_sound_one_is():
    async with agents("a") as (a,):
        await a.write(SHARED, (0, 1))
        await a.write(SHARED, (0, 2))
        at = a.memories[SHARED].sizes.buffer_at(a.memories[SHARED].find((0, 2)).index)
        a.memories[SHARED]._map[at] ^= 1
        for version in ((0, 1), (0, 2), (0, 3)):
            assert await a.ask(messages.Drop(5, SHARED, version)) == (messages.Dropped(5), None)
        assert await a.held() == [(SHARED, (0, 1), False)]
        said, _ = await a.ask(messages.Open(6, SHARED, (0, 2)))
        assert "does not hold" in said.sentence


@in_loop
async def test_a_node_outside_the_world_hears_from_the_leader_what_is_void():
    async with agents("a") as (a,):
        await a.write(SHARED, (2, 10))
        await a.write(SHARED, (2, 11))
        without = dataclasses.replace(world("b", "c"), base=Base(3, 2, 10))
        a.snapshots.hear_of(without)
        assert await a.held() == [(SHARED, (2, 10), False)], "at once: nobody is told of it"
        a.snapshots.hear_of(dataclasses.replace(without, generation=4, base=Base(4, 3, 20)))
        assert await a.held() == []


@in_loop
async def test_a_node_that_comes_back_offers_nothing_void():
    """The world it is in is the next one after that in which the base was chosen without it."""
    async with agents("a") as (a,):
        await a.write(SHARED, (1, 10))
        await a.write(SHARED, (1, 11))
        a.snapshots.hear_of(dataclasses.replace(world("a", "b"), base=Base(2, 1, 10)))
        assert await a.held() == [(SHARED, (1, 10), False)]


@in_loop
async def test_service_reports_the_base_once():
    async with agents("a") as (a,):
        for _ in range(2):
            a.tell(messages.Settled((2, 10), 3))
        a.snapshots.hear_of(dataclasses.replace(world("a", "b"), base=Base(3, 2, 10)))
        a.tell(messages.Settled((3, 12), 4))
        assert a.bases == [Base(3, 2, 10), Base(4, 3, 12)]


@in_loop
async def test_own_pieces_are_brought_to_the_next_node_and_shared_ones_to_none():
    async with agents("a", "b", "c") as (a, b, c):
        in_one_world(a, b, c, generation=0)
        await a.write(SHARED, (0, 1))
        await a.write(own(0), (0, 1))
        await b.holds(own(0), (0, 1), True)
        await a.replicates((0, 1))
        assert await b.held() == [(own(0), (0, 1), True)]
        assert await c.held() == []


@in_loop
async def test_with_two_replicas_a_version_counts_when_both_have_it():
    async with agents("a", "b", "c", replicas=2) as (a, b, c):
        in_one_world(a, b, c)
        for step in range(1, 5):
            await a.write(own(0), (0, step))
        await b.holds(own(0), (0, 4), True)
        await c.holds(own(0), (0, 4), True)
        await a.replicates((0, 4))


@in_loop
async def test_a_new_holder_has_the_base_before_the_first_commit():
    async with agents("a", "b", "c") as (a, b, c):
        in_one_world(a, b)
        await a.write(own(0), (0, 1))
        await b.holds(own(0), (0, 1), True)
        await b.snapshots.close()
        in_one_world(a, c)
        a.tell(messages.Settled((0, 1), 1))
        await c.holds(own(0), (0, 1), True)
        assert a.said == []


@in_loop
async def test_a_holder_of_something_void_is_brought_the_base(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER", 0.01)
    async with agents("a", "b") as (a, b):
        await a.write(own(0), (0, 10))
        await a.write(own(0), (0, 11))
        in_one_world(a, b)
        a.tell(messages.Sealed(own(0), (0, 11)))
        await b.holds(own(0), (0, 11), True)
        for agent in (a, b):
            agent.tell(messages.Settled((0, 10), 1))
        await b.holds(own(0), (0, 10), True)
        assert len(await b.held()) == 1


@in_loop
async def test_service_sends_the_base_after_a_version_that_became_void():
    """The node has it before we know: until then the generation may have another base."""
    async with agents("a") as (a,):
        await a.write(own(0), (0, 10))
        await a.write(own(0), (0, 11))
        given, arrived = [], asyncio.Event()

        async def give(piece, peer):
            with a.snapshots._snapshot_memory.reading(piece, None) as (_, _, held):
                given.append(held.version)
            await arrived.wait()
            return given[-1]

        replicator, a.snapshots._replicator = (
            a.snapshots._replicator,
            SimpleNamespace(give=give, forget=lambda peers: None),
        )
        a.snapshots.turn_to(world("a", "b"))
        a.tell(messages.Sealed(own(0), (0, 11)))
        while given != [(0, 11)]:
            await asyncio.sleep(0.005)
        a.tell(messages.Settled((0, 10), 1))
        while (own(0), (0, 11), False) in await a.held():
            await asyncio.sleep(0.005)
        arrived.set()
        while given != [(0, 11), (0, 10)]:
            await asyncio.sleep(0.005)
        a.snapshots._replicator = replicator


@in_loop
async def test_a_node_that_takes_no_copy_is_tried_again_and_told_of_once(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER", 0.01)
    enough = memory_limit.limits
    async with agents("a", "b") as (a, b):
        in_one_world(a, b)
        _, a.memories[own(0)] = await a.ask(messages.Room(1, own(0), 1000, 100))
        monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 10, 10)])
        await a.write(own(0), (0, 1))
        while not a.said:
            await asyncio.sleep(0.005)
        assert a.said[0].startswith(f"Cannot copy snapshots to {b.peer}: No room")
        monkeypatch.setattr(memory_limit, "limits", enough)
        await b.holds(own(0), (0, 1), True)
        assert len(a.said) == 1


@in_loop
async def test_no_room_is_told_to_the_worker_and_once_to_the_user(monkeypatch):
    monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 10, 10)])
    async with agents("a") as (a,):
        for number in (1, 2):
            said, _ = await a.ask(messages.Room(number, SHARED, 1000, 100))
            assert said.sentence.startswith("No room for snapshots of 'shared'")
        assert a.said == [said.sentence]


@in_loop
async def test_two_workers_that_lack_the_same_fetch_it_once():
    async with agents("a", "b") as (a, b):
        await a.write(SHARED, (0, 1))
        asked = [b.ask(messages.Fetch(number, SHARED, (0, 1), a.peer)) for number in (1, 2)]
        for said, made in await asyncio.gather(*asked):
            assert isinstance(said, messages.Opened)
            assert made.freshest().is_whole()
            made.close()
        said, _ = await b.ask(messages.Fetch(3, SHARED, (0, 2), a.peer))
        assert "does not hold that version" in said.sentence


@in_loop
async def test_a_newcomer_has_the_shared_state_before_its_workers_ask():
    async with agents("a", "b", "c") as (a, b, c):
        await c.write(SHARED, (2, 7))
        await c.write(SHARED, (2, 8))
        in_one_world(a, b, c)
        # b is next to c; a asks b in vain, or gets what that has just got, and then c.
        for newcomer in (a, b):
            await newcomer.holds(SHARED, (2, 8), False)
        said, made = await b.ask(messages.Fetch(1, SHARED, (2, 8), "nobody:1"))
        assert isinstance(said, messages.Opened)
        assert made.freshest().is_whole()
        made.close()


@pytest.mark.parametrize("generation", [0, 4])
@in_loop
async def test_service_of_a_first_node_fetches_nothing_unasked(generation):
    """It has written the state itself, or there is none."""
    async with agents("a", "b") as (a, b):
        seen = world("a", "b", a=a.peer, b=b.peer)
        for agent in (a, b):
            agent.snapshots.turn_to(dataclasses.replace(seen, generation=0))
        await a.write(SHARED, (0, 1))
        b.snapshots.turn_to(dataclasses.replace(seen, generation=generation))
        assert not [task for task in b.snapshots._tasks if "ahead" in repr(task.get_coro())]


@in_loop
async def test_a_newcomer_that_cannot_have_it_ahead_still_answers_its_workers(monkeypatch):
    async with agents("a", "b") as (a, b):
        await a.write(SHARED, (0, 1))
        monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 1 << 20, 1 << 20)])
        b.snapshots.turn_to(world("a", "b", a=a.peer, b=b.peer))
        said, _ = await b.ask(messages.Fetch(1, SHARED, (0, 1), a.peer))
        assert "No room" in said.sentence
        monkeypatch.undo()
        said, made = await b.ask(messages.Fetch(2, SHARED, (0, 1), a.peer))
        assert isinstance(said, messages.Opened)
        made.close()


@in_loop
async def test_service_with_the_last_copy_replicates_it():
    async with agents("a", "b", "c") as (a, b, c):
        in_one_world(a, b, c, generation=0)
        await a.write(own(0), (0, 1))
        await b.holds(own(0), (0, 1), True)
        in_one_world(b, c, generation=1)
        await c.holds(own(0), (0, 1), True)
        await b.holds(own(0), (0, 1), False)


@in_loop
async def test_copies_of_nodes_that_are_only_not_known_stay_copies():
    async with agents("a", "b", "c") as (a, b, c):
        in_one_world(a, b, c, generation=0)
        await a.write(own(0), (0, 1))
        await b.holds(own(0), (0, 1), True)
        whole = world("a", "b", "c", a=a.peer, b=b.peer, c=c.peer)
        b.snapshots.turn_to(part(whole, "b", "c"))
        assert not [task for task in b.snapshots._tasks if "adopt" in repr(task.get_coro())]


# --- placement ------------------------------------------------------------------------------------


WORLDS = st.lists(st.integers(0, 99).map("n{}".format), min_size=1, max_size=16, unique=True)


def all_pairs(nodes, replicas):
    return {(node, holder) for node in nodes for holder in holders(nodes, node, replicas)}


def test_doctests_hold():
    assert doctest.testmod(snapshot_service).failed == 0


def test_placement_of_a_node_outside_the_world_is_empty():
    assert holders(["a", "b"], "c", 1) == ()
    assert holders(["a", "b"], "a", 0) == ()


@given(WORLDS, st.integers(0, 5))
def test_each_has_so_many_others_and_holds_for_as_many(nodes, replicas):
    wanted = min(replicas, len(nodes) - 1)
    pairs = all_pairs(nodes, replicas)
    for node in nodes:
        mine = holders(nodes, node, replicas)
        assert len(set(mine)) == len(mine) == wanted
        assert node not in mine
        assert sum(holder == node for _, holder in pairs) == wanted


@given(WORLDS, st.integers(1, 3), st.data())
def test_the_loss_of_a_node_moves_only_what_it_held(nodes, replicas, data):
    lost = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != lost]
    before, after = all_pairs(nodes, replicas), all_pairs(left, replicas)
    new = after - before
    held_by_lost = {node for node, holder in before if holder == lost}
    assert {node for node, _ in new} <= held_by_lost
    assert len(new) <= len(held_by_lost)


@given(WORLDS, st.integers(1, 3))
def test_a_newcomer_moves_only_what_comes_to_it_and_what_it_brings(nodes, replicas):
    new = all_pairs([*nodes, "newcomer"], replicas) - all_pairs(nodes, replicas)
    assert all("newcomer" in pair for pair in new)
    assert len(new) <= 2 * replicas
