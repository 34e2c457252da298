"""The activity of all ranks of a world: asked of every agent, and by a user of this machine."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import socket
import stat
import threading
from types import SimpleNamespace

import pytest

from tests.unit.agent.cast import Workers, in_loop, place
from torchelastic.agent.watch import inspector
from torchelastic.agent.watch.inspector import (
    SOCKET_FILE,
    Inspector,
    QuerySocket,
    Which,
    WorldActivity,
    ask,
    lines_of,
)
from torchelastic.errors import RendezvousRefused
from torchelastic.events.analysis.hangs import RankActivity
from torchelastic.rendezvous.world import World
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS, Credentials, Secret
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.listener import Listener

GENERATION = 3


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    monkeypatch.setattr(inspector, "STACKS_TIMEOUT", 30.0)
    monkeypatch.setattr(inspector, "AGENTS_TIMEOUT", 30.0)


class Node:
    def __init__(self, name, ranks, world, secret=None):
        self.name = name
        self.listener = Listener("job", secret=secret)
        self.credentials = Credentials(secret) if secret is not None else ANONYMOUS
        self.slow, self.broken, self.asked = set(), set(), []
        workers = Workers(*ranks, doing=self.doing)
        self.ranks = ranks
        self.activities = Inspector(workers, self, node=name, job="job", world=world)

    def doing(self, local_rank, generation):
        rank = self.ranks[local_rank]
        return RankActivity(rank=rank, node=self.name) if generation == GENERATION else None

    async def of(self, local_rank):
        """Stands for the reader of stacks, too."""
        self.asked.append(local_rank)
        if local_rank in self.broken:
            raise OSError("no memory for another process")
        if local_rank in self.slow:
            await asyncio.sleep(3600)
        return f"stack {local_rank} of {self.name}"

    async def open(self):
        self.port = await self.listener.listen(bind_endpoint("127.0.0.1", 0))
        self.activities.open(self.backend)

    @property
    def backend(self):
        return SimpleNamespace(credentials=self.credentials, serve=self.listener.serve)

    @property
    def place(self):
        peer = f"127.0.0.1:{self.port}" if self.port else ""
        return place(self.name, nproc=1, peer=peer)

    async def close(self):
        await self.activities.close()
        await self.listener.close()


@contextlib.asynccontextmanager
async def nodes(*ranks, secret=None):
    worlds = []
    made = [
        Node("abcdefgh"[number], each, lambda: worlds[-1] if worlds else None, secret)
        for number, each in enumerate(ranks)
    ]
    try:
        for node in made:
            await node.open()
        world = World(generation=GENERATION, phase="running")
        worlds.append(world.with_nodes(node.place for node in made))
        yield worlds, *made
    finally:
        for node in made:
            await node.close()


@pytest.mark.parametrize("secret", [None, Secret(b"x" * 32)], ids=["open", "secret"])
@in_loop
async def test_all_nodes_are_asked(secret):
    async with nodes([0, 1], [2], [3], secret=secret) as (_, a, *_):
        found = await a.activities.everywhere()
    assert [(one.rank, one.node, one.stack) for one in found.activities] == [
        (0, "a", "stack 0 of a"),
        (1, "a", "stack 1 of a"),
        (2, "b", "stack 0 of b"),
        (3, "c", "stack 0 of c"),
    ]
    assert (found.generation, found.unheard) == (GENERATION, ())


@pytest.mark.parametrize(
    ("able", "closed", "found"),
    [("", "", False), ("b", "", True), ("c", "b", True), ("b", "b", False), ("a", "", False)],
    ids=["nobody", "one", "though another is gone", "who is gone is not", "the asking node is not"],
)
@in_loop
async def test_whether_another_node_can_go_on_is_asked(able, closed, found):
    async with nodes([0], [1], [2]) as (_, *every):
        for node in every:
            node.activities._can_go_on = lambda generation, node=node: (
                generation == GENERATION and node.name == able
            )
            if node.name == closed:
                await node.listener.close()
        assert await every[0].activities.others_can_go_on(GENERATION) is found


@in_loop
async def test_inspection_names_gone_and_silent_nodes(monkeypatch):
    monkeypatch.setattr(inspector, "AGENTS_TIMEOUT", 0.2)
    async with nodes([0], [1], [2]) as (_, a, b, c):
        await b.listener.close()
        monkeypatch.setattr(c.activities, "here", lambda generation: asyncio.sleep(3600))
        found = await a.activities.everywhere()
    assert [one.rank for one in found.activities] == [0]
    assert found.unheard == ("b", "c")


@in_loop
async def test_a_stack_that_cannot_be_read_does_not_stop_the_others(monkeypatch):
    async with nodes([0, 1], [2]) as (_, a, b):
        nothing = "no stack could be read"
        a.broken.add(1)
        b.broken.add(0)
        found = await a.activities.everywhere()
        assert [one.stack for one in found.activities] == ["stack 0 of a", nothing, nothing]
        a.broken.clear()
        a.slow.add(1)
        monkeypatch.setattr(inspector, "STACKS_TIMEOUT", 0.05)
        found = await a.activities.everywhere()
        assert [one.stack for one in found.activities] == ["stack 0 of a", nothing, nothing]


GOOD = inspector.ACTIVITY.to_json(RankActivity(rank=0, node="b"))
JUNK = {
    "too large": json.dumps({**GOOD, "rank": math.inf}),
    "no collective": json.dumps({**GOOD, "waits": [1]}),
    "no type": json.dumps({**GOOD, "type": 1}),
    "too deep": "[" * 100_000,
    "no object": "7",
    "no JSON": "junk",
}


@in_loop
async def test_inspection_ignores_invalid_answers(monkeypatch):
    async with nodes([0], [1]) as (_, a, _b):
        for name, line in JUNK.items():
            monkeypatch.setattr(inspector, "lines_of", lambda _, line=line: line.encode())
            found = await a.activities.everywhere()
            assert [one.rank for one in found.activities] == [0], name
            assert found.unheard == ("b",), name


@in_loop
async def test_of_a_world_of_which_some_nodes_are_known_the_others_are_counted():
    async with nodes([0]) as (worlds, a):
        worlds.append(worlds[0].with_nodes([a.place] * 5))
        worlds.append(dataclasses.replace(worlds[-1], nodes=(a.place,)))
        assert (await a.activities.everywhere()).unheard == ("4 more nodes",)
        worlds.clear()
        assert await a.activities.everywhere() == WorldActivity(), (
            "without a world nobody does anything"
        )


async def connect(node):
    place = Endpoint.at(f"127.0.0.1:{node.port}", "job", ANONYMOUS)
    link, _ = await connect_once(place, purpose=frames.ACTIVITIES, timeout=5.0)
    return link


@in_loop
async def test_inspection_counts_unnamed_silent_nodes(monkeypatch):
    monkeypatch.setattr(inspector, "MOST_PEERS", 2)
    async with nodes([0]) as (_, a):
        first, second = await connect(a), await connect(a)
        with pytest.raises(RendezvousRefused, match="Too many agents"):
            await connect(a)
        first.abort()
        while len(a.activities._peers) == 2:
            await asyncio.sleep(0.001)
        (await connect(a)).abort()
        second.abort()


@in_loop
async def test_junk_ends_the_connection_and_so_does_the_end_of_the_agent():
    async with nodes([0]) as (_, a):
        junk, link = await connect(a), await connect(a)
        junk.send(frames.pack_before(Which(1), b"junk"))
        await junk.ended
    await link.ended


def test_too_long_an_answer_has_no_stacks():
    many = [RankActivity(rank=rank, node="a", stack="x" * 8000) for rank in range(200)]
    assert len(lines_of(many)) < inspector.ANSWER_BYTES
    assert len(lines_of(many).splitlines()) == 200


# --- The query socket: what a user of this machine may ask an agent -------------------------------


FOUND = WorldActivity(2, (RankActivity(rank=0, node="a", stack="x"),), ("b",))


class Answers:
    async def everywhere(self):
        return FOUND


@contextlib.contextmanager
def answering(directory):
    """An agent's end, in a thread."""
    ready, over = threading.Event(), threading.Event()

    async def main():
        made = QuerySocket(directory, Answers())
        await made.open()
        ready.set()
        await asyncio.to_thread(over.wait)
        await made.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def deep(tmp_path):
    """A path that is longer than the address of a socket may be."""
    made = tmp_path / ("d" * 100) / ("e" * 100)
    made.mkdir(parents=True)
    return made


def test_query_socket_answers_repeated_queries(deep):
    with answering(deep):
        assert ask(deep) == FOUND
        assert ask(deep) == FOUND
        assert stat.S_IMODE((deep / SOCKET_FILE).stat().st_mode) == 0o600
    assert not (deep / SOCKET_FILE).exists()


def test_query_socket_replaces_leftover_of_killed_agent(deep):
    with socket.socket(socket.AF_UNIX) as left, inspector._short(deep / SOCKET_FILE) as address:
        left.bind(address)
    with pytest.raises(ConnectionRefusedError):
        ask(deep)
    with answering(deep):
        assert ask(deep) == FOUND


def test_query_socket_rejects_other_users(deep, monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        assert inspector._is_ours(one)
    monkeypatch.setattr(inspector, "_is_ours", lambda end: False)
    with answering(deep), pytest.raises(OSError, match=r"."):
        ask(deep)


def test_anything_else_is_not_answered(deep):
    for said in (b"", b"anything\n", b"x" * 100_000):
        with (
            answering(deep),
            socket.socket(socket.AF_UNIX) as end,
            inspector._short(deep / SOCKET_FILE) as address,
        ):
            end.settimeout(30)
            end.connect(address)
            with contextlib.suppress(OSError):  # it has gone before it has heard all
                end.sendall(said)
                end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(100) == b"", said[:10]
            assert ask(deep) == FOUND


@in_loop
async def test_a_directory_that_cannot_be_used_costs_the_answers_only(deep, caplog):
    (deep / SOCKET_FILE).mkdir()
    (deep / SOCKET_FILE / "x").touch()
    made = QuerySocket(deep, Answers())
    await made.open()
    await made.close()
    assert "`torchelastic stacks` cannot reach this agent" in caplog.text
    assert os.listdir(deep / SOCKET_FILE) == ["x"]
