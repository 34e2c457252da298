"""The client when connections break, hosts are late, gone, frozen or somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from tests.support import FakeClock
from tests.unit.rendezvous.cast import (
    JOB,
    connected,
    proxied,
    serving,
    soon,
    story,
    within,
)
from torchelastic.errors import ConfigError, LeaseExpired, RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.transport import connect, frames
from torchelastic.transport.connect import Endpoint, NoAnswer, is_refused_everywhere, obstacle
from torchelastic.transport.link import Link


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def something_else(
    answer: bytes | None, met: asyncio.Event | None = None
) -> AsyncIterator[int]:
    """A server that is not ours; None: closes at once. `met` is set when somebody has come."""

    async def serve(reader, writer):
        if met is not None:
            met.set()
        if answer is not None:
            writer.write(answer)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def cut_off(**options):
    """A server, what lies between it and a client, that client, and one with nothing between."""
    async with (
        serving(**options) as server,
        proxied(server.port) as proxy,
        connected(proxy.port) as store,
        connected(server.port) as other,
    ):
        yield server, proxy, store, other


# Getting a connection


@story
async def test_a_client_waits_for_its_host():
    port = unused_port()
    tried = asyncio.Event()

    async def meanwhile():
        tried.set()

    joining = asyncio.create_task(
        EmbeddedStore.connect([Endpoint("localhost", port, JOB)], timeout=None, meanwhile=meanwhile)
    )
    await within(10, tried.wait())
    assert not joining.done()
    async with serving(port):
        store = await within(10, joining)
        await store.put("a", {})
        await store.close()


@story
async def test_waiting_has_an_end():
    port = unused_port()
    with pytest.raises(RendezvousLost, match=rf"127.0.0.1:{port} within 0.1 s\. .* refuses "):
        await EmbeddedStore.connect([Endpoint("127.0.0.1", port, JOB)], timeout=0.1)


@story
async def test_a_name_that_nobody_knows_yet_is_waited_for(monkeypatch):
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo
    asked = []

    async def late(host, *args, **kwargs):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return await real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(loop, "getaddrinfo", late)
    async with serving() as server:
        store = await EmbeddedStore.connect([Endpoint("node1", server.port, JOB)], timeout=10)
        await store.close()
    assert asked == ["node1"] * 3


@story
async def test_a_name_that_cannot_be_one():
    with pytest.raises(ConfigError, match="is not a host name"):
        await EmbeddedStore.connect([Endpoint("a" * 70 + ".example", 1, JOB)], timeout=10)


NOT_OURS, MUTE = "other than a torchelastic rendezvous", "does not answer as a torchelastic"


@pytest.mark.parametrize(
    ("answer", "timeout", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None, NOT_OURS),
        (b"SSH-2.0-OpenSSH_9.2\r\n", None, NOT_OURS),
        (b"\x00\x00\x00\x02{}", None, NOT_OURS),
        (frames.pack(frames.Done(1, 1)), None, NOT_OURS),
        (None, 0.1, MUTE),
        (b"", 0.1, MUTE),
    ],
    ids=["HTTP", "SSH", "no message", "no welcome", "closes", "is silent"],
)
@story
async def test_something_else_at_the_port_is_refused(answer, timeout, sentence):
    """At once, unless it says nothing."""
    async with something_else(answer) as port:
        with pytest.raises(RendezvousRefused, match=sentence):
            await EmbeddedStore.connect([Endpoint("localhost", port, JOB)], timeout=timeout)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (socket.gaierror(-2, "unknown"), "The name 'node1' does not resolve on this node"),
        (ConnectionRefusedError(), "node1 refuses connections to port 29400: nothing listens"),
        (asyncio.TimeoutError(), "node1:29400 does not respond at all: the machine is down, or a"),
        (NoAnswer(), "Something at node1:29400 accepts connections but does not answer as a"),
        (OSError(113, "No route to host"), "node1:29400 cannot be reached: [Errno 113] No route"),
    ],
)
def test_client_without_a_host_reports_the_obstacle(problem, sentence):
    assert obstacle(Endpoint("node1", 29400, JOB), problem).startswith(sentence)


@story
async def test_why_a_node_waits_is_reported_once_in_a_while_and_when_it_changes(monkeypatch):
    """Minutes pass at every attempt."""
    problems = [socket.gaierror(-2, "?"), *[ConnectionRefusedError()] * 3, None]
    clock, said = FakeClock(), []

    async def attempt(place, **_):
        clock.advance(connect.SAY_EVERY / 2)
        problem = problems.pop(0)
        if problem is not None:
            raise problem
        return Link(), frames.Welcome(frames.PROTOCOL, frames.VERSION, "store", False)

    monkeypatch.setattr(connect, "connect_once", attempt)
    place = Endpoint("node1", 29400, JOB)
    await within(
        10, connect.connect_to_host([place], None, timeout=1e6, clock=clock, say=said.append)
    )
    assert [sentence.split(":")[0] for sentence in said] == [
        "The name 'node1' does not resolve on this node",
        *["node1 refuses connections to port 29400"] * 2,
    ]


@story
async def test_giving_up_while_waiting_leaves_nothing():
    met = asyncio.Event()
    async with something_else(b"", met) as port:
        joining = asyncio.create_task(
            EmbeddedStore.connect([Endpoint("localhost", port, JOB)], timeout=None)
        )
        await within(10, met.wait())
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining


# Losing and finding a connection


@story
async def test_a_broken_connection_is_not_noticed():
    async with cut_off(grace=5.0) as (_, proxy, store, other):
        await store.open_lease(20.0)
        await store.put("member/1", {}, leased=True)
        changes = store.watch("member/", after=0)
        everything = other.watch("", after=0)
        seen = [await within(10, changes.__anext__())]
        for n in range(2, 12):
            if n % 3 == 0:
                await proxy.cut()
            await other.put(f"member/{n}", {})
            await store.put(f"mine/{n}", {}, leased=True)
        seen += [await within(10, changes.__anext__()) for _ in range(10)]
        assert [change.key for change in seen] == [f"member/{n}" for n in range(1, 12)]
        assert await store.keep_alive()
        assert not store.lease_lost.is_set()
        assert (await other.get("")).revision == 21
        for _ in range(21):
            assert (await within(10, everything.__anext__())).item is not None


@story
async def test_a_report_that_may_not_have_been_heard_is_said_again():
    async with cut_off(grace=60.0) as (_, proxy, store, other):
        await store.open_lease(60.0)
        changes = other.watch("member/", after=0)
        for n in (1, 2):
            await store.report("member/1", {"n": n})
            await within(10, changes.__anext__())
        await proxy.cut()
        again = await within(10, changes.__anext__())
        assert again.item.value == {"n": 2}  # the last one only
        assert await store.keep_alive()
        await proxy.cut()
        assert await store.keep_alive()
        await other.put("member/2", {})
        assert (await within(10, changes.__anext__())).key == "member/2"


@story
async def test_a_report_that_is_refused_tells_that_the_lease_is_lost():
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        server._table.end_lease(store._lease.id)
        await store.report("member/1", {})
        await within(10, store.lease_lost.wait())


@story
async def test_a_write_whose_answer_was_lost_is_done_once():
    async with cut_off() as (_, proxy, store, other):
        changes = other.watch("leader", after=0)
        proxy.answers.clear()
        claim = asyncio.create_task(store.compare_and_set("leader", {}, expected=0))
        written = await within(10, changes.__anext__())
        assert not claim.done()
        await proxy.cut()
        proxy.answers.set()
        assert await within(10, claim) == written.revision
        assert (await other.get("")).revision == written.revision


@story
async def test_a_lease_whose_opening_was_not_answered_is_opened_once():
    async with cut_off() as (server, proxy, store, _):
        proxy.answers.clear()
        opening = asyncio.create_task(store.open_lease(20.0))
        await soon(lambda: bool(server._holders), "the lease at the server")
        await proxy.cut()
        proxy.answers.set()
        await within(10, opening)
        assert len(server._table._leases) == 1
        await store.put("a", {}, leased=True)


@story
async def test_client_watch_behind_the_history_receives_deletions():
    async with cut_off(table=Table(history_rows=2)) as (server, proxy, store, writer):
        async with connected(server.port) as leaver:
            await leaver.open_lease(20.0)
            await leaver.put("k/gone", {}, leased=True)
            changes = store.watch("k/", after=0)
            await within(10, changes.__anext__())
            await proxy.shut()
        for n in range(6):
            await writer.put(f"k/{n % 2}", {"n": n})
        await proxy.open()
        seen = [await within(10, changes.__anext__()) for _ in range(3)]
        assert [(change.key, change.item and change.item.value) for change in seen] == [
            ("k/gone", None),
            ("k/0", {"n": 4}),
            ("k/1", {"n": 5}),
        ]
        await writer.put("k/0", {"n": 6})
        assert (await within(10, changes.__anext__())).revision == seen[-1].revision + 1


@story
async def test_client_away_longer_than_its_lease_loses_it():
    async with cut_off(grace=0.0) as (_, proxy, store, other):
        await store.open_lease(20.0)
        await store.put("member/1", {}, leased=True)
        changes = other.watch("member/", after=0)
        await within(10, changes.__anext__())
        await proxy.shut()
        assert (await within(10, changes.__anext__())).item is None
        await proxy.open()
        assert not await store.keep_alive()
        assert store.lease_lost.is_set()
        with pytest.raises(LeaseExpired):
            await store.put("member/1", {}, leased=True)
        await store.open_lease(20.0)
        await store.put("member/1", {}, leased=True)
        assert (await within(10, changes.__anext__())).item is not None


@story
async def test_verbs_wait_for_the_connection_and_then_give_up():
    async with serving() as server, proxied(server.port) as proxy:
        store = await EmbeddedStore.connect(
            [Endpoint("127.0.0.1", proxy.port, JOB)], timeout=10, reconnect_timeout=0.3
        )
        await store.open_lease(20.0)
        changes = store.watch("", after=0)
        await proxy.shut()
        started = time.monotonic()
        waiting = [
            asyncio.ensure_future(verb)
            for verb in (store.get(""), store.put("a", {}), changes.__anext__())
        ]
        for verb in waiting:
            with pytest.raises(RendezvousLost, match=r"Lost the rendezvous at"):
                await within(10, verb)
        assert time.monotonic() - started > 0.2
        assert store.lease_lost.is_set()
        with pytest.raises(RendezvousLost):
            await store.get("")
        await store.close()
        await proxy.open()


@story
async def test_changes_that_came_in_time_are_reported_before_the_loss():
    async with serving() as server, connected(server.port) as store:
        changes = store.watch("", after=0)
        await store.put("a", {"n": 1})
        await within(10, changes.__anext__())
        await store.put("a", {"n": 2})
        await server.close()
        assert (await within(10, changes.__anext__())).item.value == {"n": 2}
        with pytest.raises(RendezvousLost):
            await within(10, changes.__anext__())


@story
async def test_the_end_of_the_host_is_reported_at_once():
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        changes = store.watch("", after=0)
        waiting = asyncio.ensure_future(changes.__anext__())
        await store.get("")
        await server.close()
        with pytest.raises(RendezvousLost, match="hosted the rendezvous has exited"):
            await within(10, waiting)
        assert store.lease_lost.is_set()


@pytest.mark.parametrize(
    ("job", "sentence"), [(JOB, "was restarted"), ("other", r"is gone: .* belongs to job 'other'")]
)
@story
async def test_another_host_at_the_port_is_a_loss(job, sentence):
    async with (
        serving() as first,
        serving(job=job) as second,
        proxied(first.port) as proxy,
        connected(proxy.port) as store,
    ):
        proxy.server_port = second.port
        await proxy.cut()
        with pytest.raises(RendezvousLost, match=sentence):
            await within(10, store.get(""))


@story
async def test_a_host_that_cannot_be_understood_is_a_loss():
    async with serving() as server, connected(server.port) as store:
        (peer,) = server._peers
        peer.link.send(b"\x00\x00\x00\x02{}")
        changes = store.watch("", after=0)
        with pytest.raises(RendezvousLost, match="this node cannot read"):
            await within(10, changes.__anext__())


@story
async def test_a_defect_in_making_connections_leaves_nobody_waiting(monkeypatch, caplog):
    async def defect(*args, **kwargs):
        raise ZeroDivisionError

    async with cut_off() as (_, proxy, store, _):
        monkeypatch.setattr("torchelastic.rendezvous.embedded.client.connect_to_host", defect)
        await proxy.cut()
        with pytest.raises(RendezvousLost, match="ZeroDivisionError"):
            await within(10, store.get(""))
    assert "ZeroDivisionError" in caplog.text


# Silence


@story
async def test_a_frozen_host_costs_the_lease_and_then_the_store():
    async with serving() as server, proxied(server.port) as proxy:
        store = await EmbeddedStore.connect(
            [Endpoint("127.0.0.1", proxy.port, JOB)], timeout=10, reconnect_timeout=0.3
        )
        await store.open_lease(0.5)
        await store.put("a", {}, leased=True)
        await asyncio.sleep(0.6)  # longer than it may be silent: it answers renewals meanwhile
        assert await store.get("")
        proxy.answers.clear()
        asking = asyncio.create_task(store.get(""))
        await within(10, store.lease_lost.wait())
        with pytest.raises(RendezvousLost, match="is frozen"):
            await within(20, asking)
        await store.close()


@story
async def test_a_process_that_stood_still_knows_before_it_does_anything():
    clock = FakeClock()
    async with serving() as server, connected(server.port, clock=clock) as store:
        await store.open_lease(60.0)
        await store.put("a", {}, leased=True)
        asking = asyncio.create_task(store.get(""))
        await asyncio.sleep(0)
        # The question is out; when the answer is read, the time is over.
        clock.advance(60.0)
        await within(10, asking)
        assert store.lease_lost.is_set()


@story
async def test_a_verb_that_is_given_up_leaves_nothing():
    async with cut_off() as (_, proxy, store, _):
        proxy.answers.clear()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.02, store.get(""))
        assert not store._requests
        proxy.answers.set()
        assert (await store.get("")).items == {}


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConnectionRefusedError(111, "no"), True),
        (OSError(113, "no route"), False),
        (OSError("Multiple exceptions: [Errno 111] at a, [Errno 111] at b"), True),
        (OSError("Multiple exceptions: [Errno 111] at a, [Errno 113] at b"), False),
        (OSError("something else"), False),
    ],
)
def test_refused_is_what_every_address_refuses(error, refused):
    assert is_refused_everywhere(error) is refused
