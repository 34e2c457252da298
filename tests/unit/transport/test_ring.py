"""The ring between agents, over real sockets, and what its doubts lead to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Set
from dataclasses import replace

import pytest

from tests.unit.rendezvous.cast import JOB, connected, serving, story, within
from torchelastic.rendezvous.held_out import HeldOut
from torchelastic.rendezvous.membership.suspicion import (
    Prober,
    RivalProber,
    Suspicion,
    replace_leader,
)
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member, World
from torchelastic.transport import frames, ring
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.listener import Listener
from torchelastic.transport.ring import Beat, Ring, lives, successor

PATIENCE = 20.0
SILENCE = 1.0


@pytest.mark.parametrize(
    ("nodes", "node", "expected"),
    [("abc", "a", "b"), ("abc", "c", "a"), ("ab", "b", "a"), ("a", "a", None), ("ab", "x", None)],
)
def test_the_next_one_is_in_order_and_round(nodes, node, expected):
    found = successor([(name, f"{name}:1") for name in nodes], node)
    assert found == (None if expected is None else (expected, f"{expected}:1"))


class Node:
    """An agent as far as the ring is concerned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.doubted: set[str] = set()
        self.silent: set[str] = set()
        self.changed = asyncio.Event()
        self.listener = Listener(JOB)
        self.ring = Ring(name, Endpoint("", 0, JOB), silence=SILENCE, on_suspicion=self.doubt)
        self.listener.serve(frames.RING, self.ring.admit)

    def doubt(self, doubted: Set[str], silent: Set[str]) -> None:
        self.doubted, self.silent = set(doubted), set(silent)
        self.changed.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    async def doubts(self, *names: str, silent: str = "") -> None:
        while (self.doubted, self.silent) != (set(names), set(silent)):
            self.changed.clear()
            await within(PATIENCE, self.changed.wait())

    async def connected(self, visitors: int) -> None:
        while len(self.ring._visitors) < visitors:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.ring.close()
        await self.listener.close()


async def answer(said: bool | None) -> bool | None:
    return said


@contextlib.asynccontextmanager
async def ring_of(names: str) -> AsyncIterator[list[Node]]:
    nodes = [Node(name) for name in names]
    for node in nodes:
        sockets = bind_endpoint("127.0.0.1", 0)
        assert sockets is not None
        await node.listener.listen(sockets)
    everybody = [(node.name, node.address) for node in nodes]
    for node in nodes:
        node.ring.turn_to(0, everybody)
    for node in nodes:
        await within(PATIENCE, node.connected(1))
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.close()


@story
async def test_ring_agent_whose_connections_end_is_doubted_by_both_neighbours():
    async with ring_of("abc") as (a, b, c):
        for link in list(b.ring._visitors):
            link.abort()
        await b.close()
        while a.doubted != {"b"}:
            await asyncio.sleep(0.01)
        assert c.doubted <= {"b"}
        assert await lives(Endpoint("127.0.0.1", int(b.address.partition(":")[2]), JOB)) is False


@story
async def test_a_silent_neighbour_is_doubted_and_trusted_when_it_speaks_again(monkeypatch):
    async with ring_of("ab") as (a, b):

        async def no_answer(*_, **__):
            raise asyncio.TimeoutError

        monkeypatch.setattr(ring, "connect_once", no_answer)
        for link in [*a.ring._visitors, *b.ring._visitors]:
            link.abort()
        await a.doubts("b", silent="b")
        monkeypatch.undo()
        await a.doubts()


@story
async def test_ring_agent_that_turns_to_another_neighbour_is_not_doubted():
    async with ring_of("abc") as (a, b, c):
        a.ring.turn_to(1, [("a", a.address), ("c", c.address)])
        await within(PATIENCE, c.connected(2))
        while len(b.ring._visitors):
            await asyncio.sleep(0.01)
        assert b.doubted == set()


@story
async def test_the_one_before_is_doubted_if_it_never_calls():
    """It is cut off: no connection of its has ended, for there was none."""
    async with ring_of("ab") as (a, b):
        a.ring.turn_to(1, [("x", "127.0.0.1:1"), ("a", a.address), ("b", b.address)])
        b.ring.turn_to(1, [("a", a.address), ("b", b.address)])
        await a.doubts("x", silent="x")
        a.ring.turn_to(1, [("b", b.address), ("a", a.address)])
        await a.doubts()


@pytest.mark.parametrize("others", ["xab", "xb"], ids=["of another world", "of a node outside it"])
@story
async def test_the_end_of_a_world_clears_the_doubts(others):
    async with ring_of("ab") as (a, b):
        addresses = {"x": "127.0.0.1:1", "a": a.address, "b": b.address}
        a.ring.turn_to(1, [(name, addresses[name]) for name in "xab"])
        await a.doubts("x", silent="x")
        a.ring.turn_to(2, [(name, addresses[name]) for name in others])
        assert (a.doubted, a.silent) == (set(), set())
        if others == "xb":
            a.ring._doubt("x")
            assert a.doubted == set()


@story
async def test_a_connection_that_is_reset_is_doubted_and_never_silent():
    async with ring_of("ab") as (a, b):
        told = []
        a.ring._on_suspicion = lambda doubted, silent: told.append((set(doubted), set(silent)))
        for link in list(b.ring._visitors):
            link.abort()
        while len(told) < 2:
            await asyncio.sleep(0.01)
        assert told[:2] == [({"b"}, set()), (set(), set())]


@story
async def test_the_end_of_an_old_connection_tells_nothing_of_who_has_called_again():
    async with ring_of("ab") as (_, b):
        (old,) = b.ring._visitors
        link, _ = await connect_once(
            Endpoint.at(b.address, JOB), purpose=frames.RING, timeout=PATIENCE
        )
        link.send(Beat("a"))
        while b.ring._callers["a"] is old:
            await asyncio.sleep(0.01)
        visitor = next(task for task in b.ring._tasks if task.get_name() == "ring visitor")
        old.abort()
        await within(PATIENCE, visitor)
        assert (b.doubted, [*b.ring._callers]) == (set(), ["a"])
        link.abort()


@story
async def test_ring_living_agent_answers():
    async with ring_of("ab") as (a, _):
        assert await lives(Endpoint("127.0.0.1", a.listener.port, JOB)) is True
        assert a.doubted == set()


@story
async def test_a_port_that_goes_while_it_is_asked_is_gone():
    def end_all(reader, writer):
        writer.transport.abort()
        server.close()

    server = await asyncio.start_server(end_all, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await lives(Endpoint("127.0.0.1", port, JOB)) is False


def member(name: str, *doubts: str) -> Member:
    return Member(node=name, name=name, addr=name, peer=f"{name}:1", nproc=1, doubts=doubts)


#: Who doubts whom; what "b" answers; whether "b" is heard of meanwhile; whether it is refused.
LOOKS = [
    ({"a": "b"}, True, False, False),
    ({"a": "b"}, False, False, True),
    ({"a": "b"}, False, True, False),  # a firewall resets its connections, but it speaks elsewhere
    ({"a": "b", "c": "b"}, None, False, False),  # silence ends no membership
    ({}, False, False, False),  # nobody doubts it
]


@pytest.mark.parametrize(("who", "said", "is_heard_of", "refused"), LOOKS)
@story
async def test_the_leader_asks_whom_others_doubt_as_long_as_they_do(
    monkeypatch, who, said, is_heard_of, refused
):
    monkeypatch.setattr("torchelastic.rendezvous.membership.suspicion.ASK_AGAIN", 0.0)
    asked = []

    async def ask(address):
        asked.append(address)
        if is_heard_of:
            suspicion.heard(member("b"))
        if len(asked) == 3:
            for node in "abc":
                suspicion.heard(member(node))
        return said

    suspicion = Suspicion(ask, lambda: None)
    for node in "abc":
        suspicion.heard(member(node, *who.get(node, "")))
    await asked_all(suspicion)
    assert suspicion.refused == ({"b"} if refused else set())
    assert asked == ["b:1"] * (0 if not who else 1 if refused else 3)
    if refused:
        suspicion.heard(member("b"))
        assert (suspicion.refused, suspicion.contested) == (set(), {"b"})
    await suspicion.close()
    assert suspicion.contested == set()


@story
async def test_a_node_that_was_doubted_before_it_joined_is_looked_into():
    """It was dropped, joins again at once, and refuses connections as it did."""
    suspicion = Suspicion(lambda address: answer(False), lambda: None)
    suspicion.heard(member("a", "b"))
    suspicion.heard(member("b"))
    await asked_all(suspicion)
    assert suspicion.refused == {"b"}


async def asked_all(suspicion: Suspicion) -> None:
    while suspicion._asking:
        await asyncio.gather(*suspicion._asking)


@pytest.mark.parametrize(
    ("said", "overdue", "is_replaced"),
    [(False, False, True), (None, False, False), (None, True, True), (True, False, False)],
    ids=["dead", "silent", "idle", "alive"],
)
@story
async def test_a_leader_that_is_dead_or_idle_is_replaced_and_stays_a_member(
    said, overdue, is_replaced
):
    asked = asyncio.Event()

    async def ask(address):
        asked.set()
        return said

    async with (
        serving() as server,
        connected(server.port) as leader,
        connected(server.port) as other,
    ):
        for store, node in ((leader, "l"), (other, "a")):
            await store.open_lease(60.0)
            await store.put(MEMBER_PREFIX + node, member(node).to_json(), leased=True)
        elected = await leader.put(LEADER_KEY, {"node": "l"}, leased=True)
        replacing = asyncio.create_task(
            replace_leader(other, {"node": "a"}, {"l"}, ask, is_overdue=lambda: overdue, every=0.01)
        )
        if is_replaced:
            assert await within(PATIENCE, replacing) == ("l" if said is False else "")
        else:
            for _ in range(3):
                asked.clear()
                await within(PATIENCE, asked.wait())
            replacing.cancel()
        found = (await other.get("")).items
        assert found[LEADER_KEY].value == {"node": "a" if is_replaced else "l"}
        assert MEMBER_PREFIX + "l" in found
        fence = (LEADER_KEY, elected)
        published = await leader.compare_and_set("world", {}, expected=0, provided=fence)
        assert (published is None) is is_replaced


@story
async def test_a_held_out_node_probes_its_rival_until_the_hold_ends():
    said: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    silent, asked = {"b:1"}, set()

    async def ask(address):
        asked.add(address)
        return address not in silent or None

    def held(*nodes):
        return tuple(HeldOut(node, node, 3, 60.0, "no answer", other) for node, other in nodes)

    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        for node in "abcd":
            await store.put(MEMBER_PREFIX + node, member(node).to_json(), leased=True)
        prober = RivalProber("a", ask, said.put_nowait)
        running = asyncio.create_task(prober.run(store))
        world = World(generation=4, phase="running", count=3)
        prober.see(replace(world, held=held(("a", "b"), ("c", "d"))))
        assert await within(PATIENCE, said.get()) == ("b",)
        silent.clear()
        assert await within(PATIENCE, said.get()) == ()
        silent.add("b:1")
        assert await within(PATIENCE, said.get()) == ("b",)
        prober.see(world)
        assert await within(PATIENCE, said.get()) == ()
        assert asked == {"b:1"}
        running.cancel()


@story
async def test_a_node_probes_the_others_until_it_reaches_them():
    said: asyncio.Queue[tuple[int, tuple[str, ...]]] = asyncio.Queue()
    silent = {"b:1", "c:1"}

    async def ask(address):
        return address not in silent or None

    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        for node in "abcd":
            await store.put(MEMBER_PREFIX + node, member(node).to_json(), leased=True)
        prober = Prober("a", ask, lambda probe, unreached: said.put_nowait((probe, unreached)))
        running = asyncio.create_task(prober.run(store))
        world = World(generation=4, phase="running", count=3)
        prober.see(world)
        assert await within(PATIENCE, said.get()) == (0, ("b", "c"))
        silent.discard("b:1")
        assert await within(PATIENCE, said.get()) == (0, ("c",))
        silent.clear()
        assert await within(PATIENCE, said.get()) == (0, ())
        silent.add("d:1")  # not noticed before another world asks for it
        prober.see(replace(world, phase="over", probe=5))
        assert await within(PATIENCE, said.get()) == (5, ("d",))
        running.cancel()
