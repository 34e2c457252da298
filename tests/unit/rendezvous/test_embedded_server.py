"""The server against raw bytes and bad clients; what clients see is in the contract test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from tests.unit.rendezvous.embedded_support import JOB, connected, run, serving, soon, within
from torchelastic.errors import WireError
from torchelastic.rendezvous.embedded import (
    EmbeddedServer,
    EmbeddedStore,
    bind_endpoint,
    wire,
)
from torchelastic.rendezvous.embedded.dial import Endpoint
from torchelastic.rendezvous.embedded.table import Row

TOKEN = "t" * 32


class RawClient:
    """Says what it is told to, and reads frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, *messages: wire.Message | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else wire.pack(message)
            self.writer.write(frame)

    async def hear(self) -> wire.Message:
        length = int.from_bytes(await within(10, self.reader.readexactly(4)), "big")
        payload = await within(10, self.reader.readexactly(length))
        return wire.parse(payload, {**wire.ANSWERS, **wire.ANSWERS_TO_HELLO})

    async def hear_the_end(self) -> None:
        with contextlib.suppress(ConnectionError):
            assert await within(10, self.reader.read()) == b""


@contextlib.asynccontextmanager
async def raw(server: EmbeddedServer, *, greet: bool = True) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = RawClient(reader, writer)
    if greet:
        client.say(wire.Hello(wire.PROTOCOL, wire.VERSION, JOB, None))
        assert isinstance(await client.hear(), wire.Welcome)
    try:
        yield client
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        (
            wire.Hello(wire.PROTOCOL, wire.VERSION, "other", None),
            "belongs to job 'job-1', not to 'other'",
        ),
        (wire.Hello(wire.PROTOCOL, wire.VERSION + 1, JOB, None), "install the same torchelastic"),
    ],
)
def test_who_is_not_for_us_is_told_why(hello, sentence):
    async def story():
        async with serving() as server, raw(server, greet=False) as client:
            client.say(hello)
            answer = await client.hear()
            assert isinstance(answer, wire.Refusal)
            assert sentence in answer.sentence
            await client.hear_the_end()
            assert server.clients == 0

    run(story())


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\xff" * 100, b"\x00\x00\x00\x00"],
)
def test_strangers_are_shown_out_without_a_word(noise):
    async def story():
        async with serving() as server, connected(server.port) as bystander:
            async with raw(server, greet=False) as stranger:
                stranger.say(noise)
                await stranger.hear_the_end()
            assert (await bystander.get("")).items == {}

    run(story())


@pytest.mark.parametrize(
    "request_",
    [
        wire.Put(1, "k", "not json", "s", None, False),
        wire.Put(1, "k", "[]", "s", None, False),
        wire.Report(1, "k", "[]"),
        wire.OpenLease(1, TOKEN, 0),
        wire.OpenLease(1, TOKEN, float("inf")),
        wire.OpenLease(1, "guessable", 1),
        wire.Done(1, 1),
    ],
)
def test_a_client_that_talks_nonsense_is_sent_away_with_a_sentence(request_):
    async def story():
        async with serving() as server, raw(server) as client:
            client.say(request_)
            assert isinstance(await client.hear(), wire.Refusal)
            await client.hear_the_end()
            assert server.clients == 0

    run(story())


def test_what_follows_a_goodbye_is_not_read():
    async def story():
        async with serving() as server, connected(server.port) as bystander:
            async with raw(server) as client:
                client.say(wire.Bye(), wire.Put(1, "k", "{}", "s", None, False))
                await client.hear_the_end()
            assert (await bystander.get("")).items == {}

    run(story())


def test_requests_need_not_wait_for_answers():
    async def story():
        async with serving() as server, raw(server) as client:
            client.say(*(wire.Put(n, f"k/{n}", "{}", f"s/{n}", None, False) for n in range(100)))
            assert [await client.hear() for _ in range(100)] == [
                wire.Done(n, n + 1) for n in range(100)
            ]

    run(story())


def test_a_request_that_comes_twice_is_done_once():
    async def story():
        async with serving() as server, raw(server) as client:
            put = wire.Put(7, "leader", "{}", "me/7", 0, False)
            client.say(put, put)
            assert [await client.hear(), await client.hear()] == [wire.Done(7, 1)] * 2

    run(story())


def test_a_lost_connection_ends_the_lease_after_a_short_grace():
    async def story():
        async with serving(grace=0.05) as server, connected(server.port) as watcher:
            changes = watcher.watch("member/", after=0)
            async with raw(server) as client:
                client.say(wire.OpenLease(1, TOKEN, 60.0))
                client.say(wire.Put(2, "member/1", "{}", "s/2", None, True))
                await within(10, changes.__anext__())
            gone = await within(10, changes.__anext__())
            assert gone.item is None

    run(story())


@pytest.mark.parametrize(("grace", "stays"), [(0.0, False), (None, True)])
def test_where_somebody_can_tell_a_lost_connection_is_waited_for_as_long_as_it_says(grace, stays):
    async def asked(rows):
        assert [row.key for row in rows] == ["member/1"]
        answered.set()
        return grace

    async def story():
        async with serving(grace=60.0, grace_of=asked) as server, connected(server.port) as watcher:
            changes = watcher.watch("member/", after=0)
            async with raw(server) as client:
                client.say(wire.OpenLease(1, TOKEN, 60.0))
                client.say(wire.Put(2, "member/1", "{}", "s/2", None, True))
                await within(10, changes.__anext__())
            await within(10, answered.wait())
            if stays:
                assert "member/1" in (await watcher.get("member/")).items
            else:
                gone = await within(10, changes.__anext__())
                assert gone.item is None

    answered = asyncio.Event()
    run(story())


def test_a_lease_is_taken_up_by_who_knows_its_token():
    async def story():
        async with serving(grace=60.0) as server:
            async with raw(server) as client:
                client.say(wire.OpenLease(1, TOKEN, 60.0))
                client.say(wire.Put(2, "member/1", "{}", "s/2", None, True))
                await client.hear()
            for token, resumed in ((TOKEN[::-1][1:] + "x", False), (TOKEN, True)):
                async with raw(server, greet=False) as client:
                    client.say(wire.Hello(wire.PROTOCOL, wire.VERSION, JOB, token))
                    welcome = await client.hear()
                    assert isinstance(welcome, wire.Welcome)
                    assert welcome.lease is resumed

    run(story())


def test_a_lease_has_one_connection():
    async def story():
        async with serving(grace=0.0) as server, raw(server) as old:
            old.say(wire.OpenLease(1, TOKEN, 60.0))
            assert await old.hear() == wire.Done(1, None)
            async with raw(server, greet=False) as new:
                new.say(wire.Hello(wire.PROTOCOL, wire.VERSION, JOB, TOKEN))
                assert isinstance(await new.hear(), wire.Welcome)
                await old.hear_the_end()
                await soon(lambda: server.clients == 1, "the old connection is forgotten")
                new.say(wire.KeepAlive(2))
                assert await new.hear() == wire.Done(2, None)

    run(story())


def test_the_holder_is_told_that_its_time_is_up():
    async def story():
        async with serving() as server, raw(server) as client:
            client.say(wire.OpenLease(1, TOKEN, 0.02))
            assert await client.hear() == wire.Done(1, None)
            assert await client.hear() == wire.LeaseEnded(TOKEN)
            client.say(wire.KeepAlive(2), wire.Put(3, "k", "{}", "s/3", None, True))
            client.say(wire.Report(4, "k", "{}"))
            assert [await client.hear() for _ in range(3)] == [wire.NoLease(id) for id in (2, 3, 4)]

    run(story())


def test_a_report_is_not_answered():
    async def story():
        async with serving() as server, raw(server) as client:
            client.say(wire.OpenLease(1, TOKEN, 60.0), wire.Report(2, "k", "{}"), wire.Get(3, "k"))
            assert await client.hear() == wire.Done(1, None)
            assert await client.hear() == wire.Rows(3, 1, [Row("k", "{}", 1, 1)], True)

    run(story())


def test_a_watcher_that_does_not_read_is_dropped():
    async def story():
        async with (
            serving(backlog=256 * 1024) as server,
            connected(server.port) as writer,
            raw(server) as stuck,
        ):
            stuck.reader._transport.pause_reading()  # type: ignore[attr-defined]
            stuck.say(wire.Watch(1, "", 0))
            for _ in range(200):
                await writer.put("k", {"x": "x" * 100_000})
                if server.clients == 1:
                    break
            assert server.clients == 1

    run(story())


def test_a_listing_may_take_several_frames():
    async def story():
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
            with pytest.raises(WireError, match="'k/0' takes"):
                await store.put("k/0", {"x": "x" * 5_000_000})
            assert len((await store.get("k/")).items) == 3

    run(story())


def test_nobody_is_watched_for_any_longer():
    async def story():
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

    run(story())


def test_waiting_to_be_alone():
    async def story():
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

    run(story())


def test_ipv6_and_ipv4_clients_are_served():
    async def story():
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

    run(story())
