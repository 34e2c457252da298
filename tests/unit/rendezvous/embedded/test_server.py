"""The server against raw bytes and bad clients; what clients see is in the contract test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from tests.unit.rendezvous.embedded_support import JOB, connected, serving, soon, story, within
from tests.unit.transport.listener_support import Stranger
from torchelastic.errors import WireError
from torchelastic.rendezvous.embedded import EmbeddedServer, EmbeddedStore, bind_endpoint
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.frames import Row

TOKEN = "t" * 32
TOLD = frames.by_kind(*frames.ANSWERS.kinds.values(), *frames.ANSWERS_TO_HELLO.kinds.values())


class RawClient(Stranger):
    """Says what it is told to, and reads frame by frame."""

    def say(self, *messages: frames.Message) -> None:
        for message in messages:
            super().say(frames.pack(message))

    async def hear(self) -> frames.Message:
        return frames.parse(await super().hear(), TOLD)


@contextlib.asynccontextmanager
async def raw(server: EmbeddedServer, *, greet: bool = True) -> AsyncIterator[RawClient]:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", server.port))
    if greet:
        client.say(frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None))
        assert isinstance(await client.hear(), frames.Welcome)
    try:
        yield client
    finally:
        await client.close()


@story
async def test_a_wrong_client_is_refused_with_a_reason():
    hellos = {
        "belongs to job 'job-1', not to 'other'": (frames.VERSION, "other"),
        f"uses version {frames.VERSION + 1} of the rendezvous protocol, but the job uses version "
        f"{frames.VERSION}: install the same torchelastic": (frames.VERSION + 1, JOB),
    }
    async with serving() as server:
        for sentence, (version, job) in hellos.items():
            async with raw(server, greet=False) as client:
                client.say(frames.Hello(frames.PROTOCOL, version, job, None))
                answer = await client.hear()
                assert isinstance(answer, frames.Refusal)
                assert sentence in answer.sentence
                assert await client.end() == b""
                assert server.clients == 0


@story
async def test_a_client_that_talks_nonsense_is_sent_away_with_a_sentence():
    nonsense = [
        frames.Put(1, "k", "not json", "s", None, False),
        frames.Put(1, "k", "[]", "s", None, False),
        frames.Report(1, "k", "[]"),
        frames.OpenLease(1, TOKEN, 0),
        frames.OpenLease(1, TOKEN, float("inf")),
        frames.OpenLease(1, "guessable", 1),
        frames.Done(1, 1),
    ]
    async with serving() as server:
        for request in nonsense:
            async with raw(server) as client:
                client.say(request)
                assert isinstance(await client.hear(), frames.Refusal), request
                assert await client.end() == b""
                assert server.clients == 0


@story
async def test_server_ignores_requests_after_a_goodbye():
    async with serving() as server, connected(server.port) as bystander:
        async with raw(server) as client:
            client.say(frames.Bye(), frames.Put(1, "k", "{}", "s", None, False))
            assert await client.end() == b""
        assert (await bystander.get("")).items == {}


@story
async def test_requests_need_not_wait_for_answers():
    async with serving() as server, raw(server) as client:
        client.say(*(frames.Put(n, f"k/{n}", "{}", f"s/{n}", None, False) for n in range(100)))
        assert [await client.hear() for _ in range(100)] == [
            frames.Done(n, n + 1) for n in range(100)
        ]


@pytest.mark.parametrize(("grace", "stays"), [(0.0, False), (None, True)])
@story
async def test_server_waits_for_a_lost_connection_as_long_as_grace_of_says(grace, stays):
    answered = asyncio.Event()

    async def asked(rows):
        assert [row.key for row in rows] == ["member/1"]
        answered.set()
        return grace

    async with serving(grace=60.0, grace_of=asked) as server, connected(server.port) as watcher:
        changes = watcher.watch("member/", after=0)
        async with raw(server) as client:
            client.say(frames.OpenLease(1, TOKEN, 60.0))
            client.say(frames.Put(2, "member/1", "{}", "s/2", None, True))
            await within(10, changes.__anext__())
        await within(10, answered.wait())
        if stays:
            assert "member/1" in (await watcher.get("member/")).items
        else:
            assert (await within(10, changes.__anext__())).item is None


@story
async def test_a_lease_is_taken_up_by_who_knows_its_token():
    async with serving(grace=60.0) as server:
        async with raw(server) as client:
            client.say(frames.OpenLease(1, TOKEN, 60.0))
            client.say(frames.Put(2, "member/1", "{}", "s/2", None, True))
            await client.hear()
        for token, resumed in ((TOKEN[::-1][1:] + "x", False), (TOKEN, True)):
            async with raw(server, greet=False) as client:
                client.say(frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, token))
                welcome = await client.hear()
                assert isinstance(welcome, frames.Welcome)
                assert welcome.lease is resumed


@story
async def test_a_lease_has_one_connection():
    async with serving(grace=0.0) as server, raw(server) as old:
        old.say(frames.OpenLease(1, TOKEN, 60.0))
        assert await old.hear() == frames.Done(1, None)
        async with raw(server, greet=False) as new:
            new.say(frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, TOKEN))
            assert isinstance(await new.hear(), frames.Welcome)
            assert await old.end() == b""
            await soon(lambda: server.clients == 1, "the old connection is forgotten")
            new.say(frames.KeepAlive(2))
            assert await new.hear() == frames.Done(2, None)


@story
async def test_the_holder_is_told_that_its_time_is_up():
    async with serving() as server, raw(server) as client:
        client.say(frames.OpenLease(1, TOKEN, 0.02))
        assert await client.hear() == frames.Done(1, None)
        assert await client.hear() == frames.LeaseEnded(TOKEN)
        client.say(frames.KeepAlive(2), frames.Put(3, "k", "{}", "s/3", None, True))
        client.say(frames.Report(4, "k", "{}"))
        assert [await client.hear() for _ in range(3)] == [frames.NoLease(id) for id in (2, 3, 4)]


@story
async def test_a_report_is_not_answered():
    async with serving() as server, raw(server) as client:
        client.say(
            frames.OpenLease(1, TOKEN, 60.0), frames.Report(2, "k", "{}"), frames.Get(3, "k")
        )
        assert await client.hear() == frames.Done(1, None)
        assert await client.hear() == frames.Rows(3, 1, [Row("k", "{}", 1, 1)], True)


@story
async def test_a_watcher_that_does_not_read_is_dropped():
    async with (
        serving(backlog=256 * 1024) as server,
        connected(server.port) as writer,
        raw(server) as stuck,
    ):
        stuck._reader._transport.pause_reading()  # type: ignore[attr-defined]
        stuck.say(frames.Watch(1, "", 0))
        for _ in range(200):
            await writer.put("k", {"x": "x" * 100_000})
            if server.clients == 1:
                break
        assert server.clients == 1


@story
async def test_a_listing_may_take_several_frames():
    async with serving() as server, connected(server.port) as store:
        for n in range(3):
            await store.put(f"k/{n}", {"x": "x" * 1_500_000})
        assert len((await store.get("k/")).items) == 3
        changes = store.watch("k/", after=0)
        assert [(await within(10, changes.__anext__())).key for _ in range(3)] == [
            "k/0",
            "k/1",
            "k/2",
        ]
        with pytest.raises(WireError, match="'k/0' has"):
            await store.put("k/0", {"x": "x" * 5_000_000})
        assert len((await store.get("k/")).items) == 3


@story
async def test_server_without_watchers_of_a_prefix_forgets_it():
    async with serving() as server, connected(server.port) as store:
        one, two = store.watch("a/", after=0), store.watch("a/", after=0)
        await store.put("a/1", {})
        for changes in (one, two):
            await within(10, changes.__anext__())
        await one.aclose()
        await store.get("")
        assert list(server._watchers) == ["a/"]
        await two.aclose()
        await store.get("")
        assert not server._watchers


@story
async def test_waiting_to_be_alone():
    async with serving() as server:
        assert await server.wait_alone(0)
        async with connected(server.port) as own:
            async with connected(server.port):
                assert not await server.wait_alone(0, own=1)
                waiting = asyncio.create_task(server.wait_alone(10, own=1))
                await asyncio.sleep(0)
                assert not waiting.done()
            assert await waiting
            assert (await own.get("")).items == {}
        assert await server.wait_alone(10)


@story
async def test_ipv6_and_ipv4_clients_are_served():
    sockets = bind_endpoint("0.0.0.0", 0)
    assert sockets is not None
    both = sockets[0].family == socket.AF_INET6
    server = EmbeddedServer(JOB)
    port = await server.start(sockets)
    for host in ("127.0.0.1", "::1") if both else ("127.0.0.1",):
        store = await EmbeddedStore.connect([Endpoint(host, port, JOB)], timeout=10)
        assert store.local_addr == host
        await store.close()
    await server.close()
