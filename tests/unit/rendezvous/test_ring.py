"""The ring between agents, over real sockets, and what its doubts lead to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.unit.rendezvous.embedded_support import JOB, story, within
from torchelastic.rendezvous.doubts import Doubts
from torchelastic.rendezvous.embedded import wire
from torchelastic.rendezvous.embedded.dial import Endpoint
from torchelastic.rendezvous.embedded.endpoint import bind_endpoint
from torchelastic.rendezvous.embedded.reception import Reception
from torchelastic.rendezvous.embedded.ring import Ring, lives, successor
from torchelastic.rendezvous.world import Member

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
        self.changed = asyncio.Event()
        self.reception = Reception(JOB)
        self.ring = Ring(name, Endpoint("", 0, JOB), silence=SILENCE, on_doubts=self.doubt)
        self.reception.serve(wire.RING, self.ring.admit)

    def doubt(self, nodes: set[str]) -> None:
        self.doubted = nodes
        self.changed.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.reception.port}"

    async def doubts(self, *names: str) -> None:
        while self.doubted != set(names):
            self.changed.clear()
            await within(PATIENCE, self.changed.wait())

    async def connected(self, guests: int) -> None:
        while len(self.ring._guests) < guests:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.ring.close()
        await self.reception.close()


@contextlib.asynccontextmanager
async def ring_of(names: str) -> AsyncIterator[list[Node]]:
    nodes = [Node(name) for name in names]
    for node in nodes:
        sockets = bind_endpoint("127.0.0.1", 0)
        assert sockets is not None
        await node.reception.listen(sockets)
    everybody = [(node.name, node.address) for node in nodes]
    for node in nodes:
        node.ring.turn_to(everybody)
    for node in nodes:
        await within(PATIENCE, node.connected(1))
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.close()


@story
async def test_both_neighbours_doubt_an_agent_whose_connections_end():
    async with ring_of("abc") as (a, b, c):
        for link in list(b.ring._guests):
            link.abort()
        await b.close()
        await a.doubts("b")
        assert c.doubted <= {"b"}
        assert await lives(Endpoint("127.0.0.1", int(b.address.partition(":")[2]), JOB)) is False


@story
async def test_a_silent_neighbour_is_doubted_and_trusted_when_it_speaks_again(monkeypatch):
    async with ring_of("ab") as (a, b):

        async def say_nothing(link):
            await asyncio.Event().wait()

        monkeypatch.setattr(b.ring, "_beat", say_nothing)
        for link in list(b.ring._guests):
            link.abort()  # it is called again, and does not speak now
        await a.doubts("b")
        monkeypatch.undo()
        await a.doubts()


@story
async def test_who_turns_to_another_neighbour_is_not_doubted():
    async with ring_of("abc") as (a, b, c):
        a.ring.turn_to([("a", a.address), ("c", c.address)])
        await within(PATIENCE, c.connected(2))
        while len(b.ring._guests):
            await asyncio.sleep(0.01)
        assert b.doubted == set()


@story
async def test_who_lives_says_so():
    async with ring_of("ab") as (a, _):
        assert await lives(Endpoint("127.0.0.1", a.reception.port, JOB)) is True
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


@pytest.mark.parametrize(
    ("answer", "is_heard_of", "given_up"),
    [
        (True, False, []),
        (False, False, ["b"]),
        (None, False, ["b"]),
        (False, True, []),  # a firewall resets its connections, but it speaks through the store
        (None, True, []),
    ],
)
@story
async def test_the_leader_asks_whom_others_doubt_and_decides(answer, is_heard_of, given_up):
    gone = []

    async def ask(address):
        assert address == "b:1"
        if is_heard_of:
            doubts.heard(member("b", "a"))
        return answer

    async def give_up(node):
        gone.append(node)

    doubts = Doubts(ask, give_up)
    doubts.heard(member("b"))
    doubts.heard(member("a", "b"))
    while doubts._asking:
        await asyncio.gather(*doubts._asking.values())
    assert [node for node in gone if node == "b"] == given_up
    await doubts.close()
