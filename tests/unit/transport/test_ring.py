"""The ring between agents, over real sockets, and what its doubts lead to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.unit.rendezvous.embedded_support import JOB, connected, serving, story, within
from torchelastic.rendezvous.membership.suspicion import Suspicion, give_up_leader
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX, Member
from torchelastic.transport import frames
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
        self.changed = asyncio.Event()
        self.listener = Listener(JOB)
        self.ring = Ring(name, Endpoint("", 0, JOB), silence=SILENCE, on_suspicion=self.doubt)
        self.listener.serve(frames.RING, self.ring.admit)

    def doubt(self, nodes: set[str]) -> None:
        self.doubted = nodes
        self.changed.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    async def doubts(self, *names: str) -> None:
        while self.doubted != set(names):
            self.changed.clear()
            await within(PATIENCE, self.changed.wait())

    async def connected(self, visitors: int) -> None:
        while len(self.ring._visitors) < visitors:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.ring.close()
        await self.listener.close()


@contextlib.asynccontextmanager
async def ring_of(names: str) -> AsyncIterator[list[Node]]:
    nodes = [Node(name) for name in names]
    for node in nodes:
        sockets = bind_endpoint("127.0.0.1", 0)
        assert sockets is not None
        await node.listener.listen(sockets)
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
        for link in list(b.ring._visitors):
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
        for link in list(b.ring._visitors):
            link.abort()  # it is called again, and does not speak now
        await a.doubts("b")
        monkeypatch.undo()
        await a.doubts()


@story
async def test_who_turns_to_another_neighbour_is_not_doubted():
    async with ring_of("abc") as (a, b, c):
        a.ring.turn_to([("a", a.address), ("c", c.address)])
        await within(PATIENCE, c.connected(2))
        while len(b.ring._visitors):
            await asyncio.sleep(0.01)
        assert b.doubted == set()


@story
async def test_the_one_before_is_doubted_if_it_never_calls():
    """It is cut off: no connection of its has ended, for there was none."""
    async with ring_of("ab") as (a, b):
        a.ring.turn_to([("x", "127.0.0.1:1"), ("a", a.address), ("b", b.address)])
        b.ring.turn_to([("a", a.address), ("b", b.address)])
        await a.doubts("x")
        a.ring.turn_to([("b", b.address), ("a", a.address)])
        await a.doubts()


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
async def test_who_lives_says_so():
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


#: Who doubts whom; what "b" answers, everybody else lives; whether "b" is heard of meanwhile; and
#: whom the leader, "l", gives up.
LOOKS = [
    ({"a": "b"}, True, False, []),
    ({"a": "b"}, False, False, ["b"]),
    ({"a": "b"}, None, False, ["b"]),  # the leader is the second one
    ({"l": "b"}, None, False, ["b"]),  # the leader alone: it is silent at the store, too
    ({"l": "b", "b": "l"}, None, False, []),  # it doubts the leader: cut off, the lease decides
    ({"l": "b"}, False, False, ["b"]),
    ({"a": "b"}, False, True, []),  # a firewall resets its connections, but it speaks elsewhere
    ({"a": "b"}, None, True, ["b"]),  # it reaches the store, but nobody reaches it
    ({"l": "b"}, None, True, []),
]


@pytest.mark.parametrize(("who", "answer", "is_heard_of", "given_up"), LOOKS)
@story
async def test_the_leader_asks_whom_others_doubt_and_decides(who, answer, is_heard_of, given_up):
    assert await given_up_by_the_leader(who, {"b": answer}, is_heard_of=is_heard_of) == given_up


@story
async def test_a_leader_that_is_cut_off_gives_nobody_up_but_itself():
    silent = dict.fromkeys("abc")
    assert await given_up_by_the_leader({"l": "b", "b": "l"}, silent) == ["l"]
    # Of two nodes neither knows on which side the cut is.
    assert await given_up_by_the_leader({"l": "b", "b": "l"}, silent, members="lb") == []


@story
async def test_a_second_doubt_counts_that_comes_while_the_leader_asks_the_others():
    gone = []

    async def ask(address):
        if address == "a:1":  # of all, and not of one who is doubted
            doubts.heard(member("c", "b"))
        return None if address == "b:1" else True

    async def give_up(node, is_unreachable):
        gone.append((node, is_unreachable))

    doubts = Suspicion("l", ask, give_up, again=0.0)
    for name in "abcl":
        doubts.heard(member(name, *("b" if name == "l" else "")))
    while doubts._asking:
        await asyncio.gather(*doubts._asking)
    assert gone == [("b", True)]


@story
async def test_a_node_that_was_doubted_before_it_joined_is_looked_into():
    """The leader before was given up, joins again at once, and is as silent as it was."""
    assert await given_up_by_the_leader({"a": "b"}, {"b": None}, members="ac", later="b") == ["b"]


async def given_up_by_the_leader(who, answers, *, is_heard_of=False, members="labc", later=""):
    gone = []

    async def ask(address):
        node = address.removesuffix(":1")
        if is_heard_of and node == "b":
            doubts.heard(member("b", "a"))
        return answers.get(node, True)

    async def give_up(node, is_unreachable):
        assert is_unreachable is (answers[node if node in answers else "b"] is None)
        gone.append(node)

    doubts = Suspicion("l", ask, give_up, again=0.0)
    for node in (*members, *who, *later):
        doubts.heard(member(node, *who.get(node, "") if node in who else ""))
    while doubts._asking:
        await asyncio.gather(*doubts._asking)
    await doubts.close()
    return sorted(set(gone))


@pytest.mark.parametrize(
    ("answer", "others", "leader_doubts", "is_given_up"),
    [
        (False, ["c"], [], True),
        (None, ["c"], ["a"], True),  # a second node doubts it, too
        (None, [], [], True),  # it is silent at the store, too
        (None, [], ["a"], False),  # cut off alone, or of two nodes: the lease decides
        (True, ["c"], [], False),
    ],
)
@story
async def test_a_silent_leader_is_given_up_by_two_who_doubt_it(
    answer, others, leader_doubts, is_given_up
):
    asked = asyncio.Event()

    async def ask(address):
        asked.set()
        return answer

    async with (
        serving() as server,
        connected(server.port) as leader,
        connected(server.port) as other,
    ):
        for store, nodes in ((leader, "l"), (other, "abc")):
            await store.open_lease(60.0)
            for node in nodes:
                doubts = leader_doubts if node == "l" else ()
                doubts = "l" if node in ("a", *others) else doubts
                record = member(node, *doubts).to_json()
                await store.put(MEMBER_PREFIX + node, record, leased=True)
        await leader.put(LEADER_KEY, {"node": "l"}, leased=True)
        giving_up = asyncio.create_task(give_up_leader(other, "a", {"l"}, ask, again=0.01))
        if is_given_up:
            await within(PATIENCE, leader.lease_lost.wait())
            await within(PATIENCE, giving_up)
        else:
            for _ in range(3):
                asked.clear()
                await within(PATIENCE, asked.wait())
            assert not leader.lease_lost.is_set()
            giving_up.cancel()
