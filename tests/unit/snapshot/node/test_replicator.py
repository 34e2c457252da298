"""Snapshots from one agent to another, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import functools
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Authority
from torchelastic.config import LaunchConfig
from torchelastic.errors import TransferError
from torchelastic.snapshot import layout
from torchelastic.snapshot.layout import SHARED, own, shard
from torchelastic.snapshot.node import replicator, stream
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.snapshot.node.replicator import Replicator
from torchelastic.snapshot.node.stream import BURST, Bucket, Header, SnapshotStream
from torchelastic.system import memory_limit
from torchelastic.system.memory_limit import Limit, NoRoom
from torchelastic.transport import credentials, frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS, Credentials, Secret
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.listener import Listener
from torchelastic.transport.tls import TlsPipe

JOB = "job"
SECRET = Credentials(Secret(b"the secret of this job"))
SIZE = 3 * stream.CHUNK + 17


@dataclass
class Node:
    name: str
    snapshot_memory: SnapshotMemory
    replicator: Replicator
    peer: str

    def write(self, piece, version, size=SIZE, summed=None):
        """What a worker does."""
        kept = self.snapshot_memory.memory_for(piece, size, 100)
        buffer = kept.memory.begin(version)
        buffer[:] = content(version, size)
        checksum = layout.checksum(buffer) if summed is None else summed
        kept.memory.seal(version, b'{"a": 1}', size, checksum, rank=1, size=2)
        return kept

    def held(self):
        return [
            (item.piece, item.version, item.replica) for item in self.snapshot_memory.holdings()
        ]

    def assert_holds(self, piece, version, size=SIZE):
        with self.snapshot_memory.reading(piece, version) as (_, _, held):
            assert held.is_whole()
            assert held.data == content(version, size)
            assert (held.skeleton, held.rank, held.size) == (b'{"a": 1}', 1, 2)


def content(version, size):
    return (bytes(range(251)) * (size // 251 + 1))[version[1] : version[1] + size - 300] + bytes(
        300
    )


@contextlib.asynccontextmanager
async def node(name: str, shown: Credentials = SECRET, **options) -> AsyncIterator[Node]:
    snapshot_memory = SnapshotMemory()
    replicator = Replicator(snapshot_memory, name, JOB, shown, **options)
    listener = Listener(JOB, secret=shown.secret, tls=shown.server_tls)
    listener.serve(frames.SNAPSHOT, replicator.admit)
    port = await listener.listen(bind_endpoint("127.0.0.1", 0))
    try:
        yield Node(name, snapshot_memory, replicator, f"127.0.0.1:{port}")
    finally:
        await replicator.close()
        await listener.close()
        snapshot_memory.close()


def told(story):
    """A test that is a coroutine."""

    @functools.wraps(story)
    def test(*arguments, **named):
        asyncio.run(asyncio.wait_for(story(*arguments, **named), 60))

    return test


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Credentials:
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    issued = authority.issue("node")
    return credentials.load(
        LaunchConfig(rdzv_tls_cert=issued.cert, rdzv_tls_key=issued.key, rdzv_tls_ca=authority.cert)
    )


@pytest.fixture(params=["open", "secret", "tls"])
def shown(request) -> Credentials:
    if request.param == "tls":
        return request.getfixturevalue("tls")
    return ANONYMOUS if request.param == "open" else SECRET


@told
async def test_replicator_fetches_a_piece_from_another_node(shown):
    async with node("a", shown) as a, node("b", shown) as b:
        a.write(SHARED, (0, 1))
        a.write(SHARED, (0, 2))
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        b.assert_holds(SHARED, (0, 1))
        await b.replicator.fetch(SHARED, (0, 2), a.peer)
        assert b.held() == [(SHARED, (0, 2), False), (SHARED, (0, 1), False)]
        b.assert_holds(SHARED, (0, 2))


@told
async def test_pieces_are_given_again_and_again_over_one_connection(shown):
    async with node("a", shown) as a, node("b", shown) as b:
        for step in range(1, 5):
            a.write(own(1), (0, step))
            assert await a.replicator.give(own(1), b.peer) == (0, step)
            b.assert_holds(own(1), (0, step))
        assert b.held() == [(own(1), (0, step), True) for step in (4, 3, 2)]
        assert len(b.replicator._visitors) == len(a.replicator._pipes) == 1


@told
async def test_replicator_sends_no_version_twice():
    async with node("a") as a, node("b") as b:
        kept = a.write(own(1), (0, 1))
        await a.replicator.give(own(1), b.peer)
        os.pwrite(kept.descriptor, b"?", kept.sizes.buffer_at(0))  # would not be taken
        assert await a.replicator.give(own(1), b.peer) == (0, 1)


@told
async def test_an_older_version_is_taken_once_the_fresher_one_is_void():
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 10))
        a.write(own(1), (0, 11))
        await a.replicator.give(own(1), b.peer)
        a.snapshot_memory.drop_void((0, 10), 1)
        with pytest.raises(TransferError, match="holds a newer version"):
            await a.replicator.give(own(1), b.peer)
        b.snapshot_memory.drop_void((0, 10), 1)
        assert await a.replicator.give(own(1), b.peer) == (0, 10)
        assert b.held() == [(own(1), (0, 10), True)]


@told
async def test_the_copy_of_a_dropped_version_makes_way_before_that_of_a_good_one():
    """One rank has not kept step 2, so all have dropped it: until step 3 is whole, 1 is needed."""
    async with node("a") as a, node("b") as b:
        for step in (1, 2):
            kept = a.write(shard(1), (0, step))
            await a.replicator.give(shard(1), b.peer)
        kept.memory.drop((0, 2))
        a.write(shard(1), (0, 3))
        await a.replicator.give(shard(1), b.peer)
        assert b.held() == [(shard(1), (0, 3), True), (shard(1), (0, 1), True)]


@told
async def test_the_memory_that_was_fetched_into_is_the_workers_to_write_to():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 1))
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        assert b.write(SHARED, (1, 2)).memory.find((0, 1)) is not None


@told
async def test_replicator_fetch_of_a_base_voids_later_versions():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 10))
        b.write(SHARED, (0, 11))
        await b.replicator.fetch(SHARED, (0, 10), a.peer)
        assert b.held() == [(SHARED, (0, 10), False)]


@told
async def test_replicator_refuses_an_unknown_piece_and_keeps_the_connection():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 2))
        with pytest.raises(TransferError, match="does not hold that version of 'shared'"):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)
        await b.replicator.fetch(SHARED, (0, 2), a.peer)


@told
async def test_bytes_that_do_not_fit_their_checksum_are_not_kept():
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        await a.replicator.give(own(1), b.peer)
        a.write(own(1), (0, 2), summed=7)
        with pytest.raises(TransferError, match="overwritten"):
            await a.replicator.give(own(1), b.peer)
        assert b.held() == [(own(1), (0, 1), True)]
        a.write(own(1), (0, 3))
        await a.replicator.give(own(1), b.peer)
        b.assert_holds(own(1), (0, 3))


@told
async def test_bytes_that_were_fetched_are_for_the_worker_to_sum():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 2), summed=7)
        await b.replicator.fetch(SHARED, (0, 2), a.peer)
        with b.snapshot_memory.reading(SHARED, (0, 2)) as (_, _, held):
            assert not held.is_whole()


@told
async def test_replicator_drops_a_piece_overwritten_in_transfer(monkeypatch):
    """The last bytes lie in the memory of who sends until they are taken."""
    send = replicator._send

    def send_late(to, memory, descriptor, held, wait):
        send(to, memory, descriptor, held, wait)
        memory.drop(held.version)

    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 1))
        a.write(SHARED, (0, 2))
        monkeypatch.setattr(replicator, "_send", send_late)
        with pytest.raises(TransferError, match="has been overwritten"):
            await b.replicator.fetch(SHARED, (0, 2), a.peer)
        assert b.held() == []
        monkeypatch.setattr(replicator, "_send", send)
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        b.assert_holds(SHARED, (0, 1))


@told
async def test_the_freshest_can_be_had_without_knowing_which_it_is():
    async with node("a") as a, node("b") as b:
        with pytest.raises(TransferError, match="does not hold"):
            await b.replicator.fetch_freshest(SHARED, a.peer)
        a.write(SHARED, (3, 10))
        a.write(SHARED, (3, 11))
        await b.replicator.fetch_freshest(SHARED, a.peer)
        b.assert_holds(SHARED, (3, 11))
        assert b.held() == [(SHARED, (3, 11), False)]


def test_a_small_pipe_does_it_too(monkeypatch):
    """The kernel limits what a user may have in pipes."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(stream, "fcntl", SimpleNamespace(fcntl=refuse, F_SETPIPE_SZ=0))
    test_replicator_fetches_a_piece_from_another_node(SECRET)


@told
async def test_a_node_without_room_says_so(monkeypatch):
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 1 << 20, 1 << 20)])
        with pytest.raises(TransferError, match="No room for snapshots of 'own:1'"):
            await a.replicator.give(own(1), b.peer)
        with pytest.raises(NoRoom, match="No room"):
            await b.replicator.fetch(own(1), (0, 1), a.peer)
        assert b.held() == []


@told
async def test_copies_keep_to_their_bandwidth_and_the_loop_goes_on():
    async with node("a", bandwidth=20 * stream.CHUNK) as a, node("b") as b:
        a.write(own(1), (0, 1), size=10 * stream.CHUNK)
        loop, ticks = asyncio.get_running_loop(), 0
        began = loop.time()
        giving = asyncio.create_task(a.replicator.give(own(1), b.peer))
        while not giving.done():
            await asyncio.sleep(0.005)
            ticks += 1
        # A tenth of a second's worth is saved up.
        assert loop.time() - began >= 0.39
        assert ticks >= 10
        b.assert_holds(own(1), (0, 1), size=10 * stream.CHUNK)


@told
async def test_the_end_of_an_agent_ends_its_transfers_at_once():
    async with node("a", bandwidth=5 * stream.CHUNK) as a, node("b") as b:
        a.write(own(1), (0, 1), size=25 * stream.CHUNK)
        giving = asyncio.create_task(a.replicator.give(own(1), b.peer))
        while not b.held() and not b.snapshot_memory._kept:
            await asyncio.sleep(0.005)
        await asyncio.wait_for(b.replicator.close(), 10)
        with pytest.raises(TransferError, match=r"Lost the agent"):
            await asyncio.wait_for(giving, 20)
        assert b.held() == []
        with pytest.raises(TransferError):
            await a.replicator.give(own(1), b.peer)


@told
async def test_giving_ends_with_this_agent():
    async with node("a", bandwidth=5 * stream.CHUNK) as a, node("b") as b:
        a.write(own(1), (0, 1), size=25 * stream.CHUNK)
        giving = asyncio.create_task(a.replicator.give(own(1), b.peer))
        while not b.snapshot_memory._kept:
            await asyncio.sleep(0.005)
        await asyncio.wait_for(a.replicator.close(), 10)
        with pytest.raises(TransferError):
            await giving


@told
async def test_replicator_without_a_peer_fails():
    async with node("a") as a:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        for peer in (nobody, "no place at all", ""):
            with pytest.raises(TransferError, match="did not answer"):
                await a.replicator.fetch(SHARED, (0, 1), peer)


@told
async def test_replicator_rejects_a_wrong_secret():
    other = Credentials(Secret(b"another secret, of another job"))
    async with node("a") as a, node("b", other) as b:
        a.write(SHARED, (0, 1))
        with pytest.raises(TransferError, match="different secret"):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)


@told
async def test_connections_to_nodes_that_are_gone_are_closed():
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        await a.replicator.give(own(1), b.peer)
        a.replicator.forget({b.peer})
        assert len(a.replicator._pipes) == 1
        a.replicator.forget(set())
        assert len(a.replicator._pipes) == 0


def hold_serving(monkeypatch):
    """What peers ask for is done when the event that is returned is set."""
    goes_on, serve = threading.Event(), replicator._serve

    def held(peer, snapshot_memory):
        assert goes_on.wait(30)
        serve(peer, snapshot_memory)

    monkeypatch.setattr(replicator, "_serve", held)
    return goes_on


async def rest(one):
    """Who has been served is known to the loop a little later than to the peer."""
    while len(one.replicator._resting) < len(one.replicator._visitors):
        await asyncio.sleep(0.005)


@told
async def test_idle_peers_make_room_and_busy_ones_stay(monkeypatch):
    monkeypatch.setattr(replicator, "MOST_VISITORS", 2)

    async with node("a") as a, node("b") as b, node("c") as c, node("d") as d, node("e") as e:
        a.write(SHARED, (0, 1))
        for other in (b, c, d):
            await other.replicator.fetch(SHARED, (0, 1), a.peer)
            await rest(a)
        assert len(a.replicator._visitors) == 2
        goes_on = hold_serving(monkeypatch)
        a.write(SHARED, (0, 2))
        fetching = [
            asyncio.create_task(one.replicator.fetch(SHARED, (0, 2), a.peer)) for one in (b, c)
        ]
        while a.replicator._resting or len(a.replicator._visitors) < 2:
            await asyncio.sleep(0.005)
        with pytest.raises(TransferError, match="too many snapshot connections"):
            await e.replicator.fetch(SHARED, (0, 2), a.peer)
        goes_on.set()
        await asyncio.gather(*fetching)
        await rest(a)
        await d.replicator.fetch(SHARED, (0, 2), a.peer)


@told
async def test_replicator_keeps_waiting_clients_informed(monkeypatch):
    """One survivor serves a few at a time, and each may take longer than silence is borne."""
    monkeypatch.setattr(replicator, "WAIT_INTERVAL", 0.01)
    heard, receive = threading.Event(), stream.SnapshotStream.receive_reply

    def receive_reply(self):
        kind, sentence = receive(self)
        if kind == stream.WAIT:
            heard.set()
        return kind, sentence

    monkeypatch.setattr(stream.SnapshotStream, "receive_reply", receive_reply)

    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(node("a"))
        a.write(SHARED, (0, 1))
        others = [
            await stack.enter_async_context(node(f"b{number}"))
            for number in range(replicator.MOST_INCOMING + 2)
        ]
        goes_on = hold_serving(monkeypatch)
        fetching = [
            asyncio.create_task(one.replicator.fetch(SHARED, (0, 1), a.peer)) for one in others
        ]
        assert await asyncio.to_thread(heard.wait, 30)
        goes_on.set()
        await asyncio.gather(*fetching)
        for one in others:
            one.assert_holds(SHARED, (0, 1))


@told
async def test_replicator_retries_a_busy_node(monkeypatch):
    monkeypatch.setattr(replicator, "WAIT_INTERVAL", 0.01)

    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        for _ in range(replicator.MOST_INCOMING):
            await b.replicator._turns.acquire()
        with pytest.raises(TransferError, match="is busy"):
            await a.replicator.give(own(1), b.peer)
        for _ in range(replicator.MOST_INCOMING):
            b.replicator._turns.release()
        while b.replicator._visitors:
            await asyncio.sleep(0.005)
        assert await a.replicator.give(own(1), b.peer) == (0, 1)


@pytest.mark.parametrize("name", ["_serve", "_fetch"])
@told
async def test_replicator_closes_on_an_unexpected_message(monkeypatch, name):
    def fails(*_):
        raise RuntimeError("not foreseen")

    async with node("a") as a, node("b") as b:
        unseen = []
        asyncio.get_running_loop().set_exception_handler(lambda _, seen: unseen.append(seen))
        monkeypatch.setattr(replicator, name, fails)
        with pytest.raises((TransferError, RuntimeError)):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)
        while a.replicator._visitors:
            await asyncio.sleep(0.005)
        assert not b.replicator._pipes


@told
async def test_bytes_go_nowhere_else_when_their_memory_is_wanted_otherwise(monkeypatch, tmp_path):
    """The sender stops amid a version, this node commits on, and files are opened and closed."""
    begun, goes_on, send_file = (
        threading.Event(),
        threading.Event(),
        stream.SnapshotStream.send_file,
    )

    def send_half(self, descriptor, at, size, wait):
        send_file(self, descriptor, at, size // 2, wait)
        begun.set()
        assert goes_on.wait(30)
        send_file(self, descriptor, at + size // 2, size - size // 2, wait)

    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 5))
        await a.replicator.give(own(1), b.peer)
        a.write(own(1), (1, 6))
        monkeypatch.setattr(stream.SnapshotStream, "send_file", send_half)
        giving = asyncio.create_task(a.replicator.give(own(1), b.peer))
        assert await asyncio.to_thread(begun.wait, 30)
        for step in (6, 7, 8):
            b.write(own(0), (1, step), size=1000)
            b.snapshot_memory.sealed([(own(0), (1, step))])
        files = [open(tmp_path / str(number), "wb") for number in range(8)]  # noqa: SIM115
        goes_on.set()
        assert await giving == (1, 6)
        for file in files:
            file.close()
        assert {file.stat().st_size for file in tmp_path.iterdir()} == {0}
        b.assert_holds(own(1), (1, 6))


GOOD = Header(kind=stream.WANT, piece=SHARED, version=(0, 1)).pack()
HUGE = Header(
    kind=stream.GIVE, piece=own(0), version=(0, 1), room=1 << 45, used=1 << 45, origin="x"
).pack()


NONSENSE = [
    b"GET / HTTP/1.1\r\n\r\n" * 20,
    b"\0" * 400,
    b"\xff" * 400,
    GOOD[:4] + b"\x09" + GOOD[5:],
    GOOD[:5] + b"own:\xc3\xa4".ljust(24, b"\0") + GOOD[29:],
    GOOD[:5] + b"../../etc".ljust(24, b"\0") + GOOD[29:],
    Header(kind=stream.FOUND, piece=SHARED, version=(0, 1)).pack(),
    Header(kind=stream.GIVE, piece=SHARED, version=(0, 1), room=1, used=2).pack(),
    Header(kind=stream.GIVE, piece=SHARED, version=(-1, 1), room=1, used=1).pack(),
    Header(kind=stream.WANT, piece=SHARED, version=(0, 1), rank=5, size=2).pack(),
    Header(kind=stream.GIVE, piece=SHARED, version=(0, 1), room=1 << 60).pack(),
    HUGE,
    Header(kind=stream.GIVE, piece=SHARED, version=(9, 9), room=9, used=9, origin="x").pack(),
    GOOD[:50],
]


@told
async def talk_nonsense():
    loop = asyncio.get_running_loop()
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 1))
        for said in NONSENSE:
            link, _ = await connect_once(
                Endpoint.at(a.peer, JOB, SECRET), purpose=frames.SNAPSHOT, timeout=5
            )
            connection, _ = link.detach()
            with connection:
                connection.setblocking(False)
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while await asyncio.wait_for(loop.sock_recv(connection, 4096), 10):
                        pass
            assert a.held() == [(SHARED, (0, 1), False)], said
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        while len(a.replicator._visitors) != 1:
            await asyncio.sleep(0.005)


def test_nonsense_ends_the_connection_or_is_refused_and_harms_nobody(caplog):
    talk_nonsense()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@told
async def test_replicator_closes_on_a_message_before_the_welcome():
    """What comes right behind the greeting may have been read with it."""
    async with node("a", ANONYMOUS) as a:
        a.write(SHARED, (0, 1))
        hello = frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None, frames.SNAPSHOT)
        port = int(a.peer.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frames.pack(hello) + GOOD)
        assert len(await asyncio.wait_for(reader.read(), 10)) < 200
        writer.close()
        await writer.wait_closed()
        assert not a.replicator._visitors


def test_no_thread_is_left():
    before = threading.active_count()
    test_replicator_sends_no_version_twice()
    assert threading.active_count() == before


def test_a_header_survives_its_journey():
    full = Header(
        kind=stream.GIVE,
        piece=own(999_999_999),
        version=(1, 2),
        origin="0123456789ab",
        rank=3,
        size=8,
        room=1 << 40,
        skeleton_room=1 << 20,
        used=12345,
        skeleton=77,
        checksum=0xFFFFFFFF,
        before=(1, 1),
    )
    for header in (full, Header(kind=stream.WANT, piece=SHARED, version=(3, 4))):
        assert Header.unpack(header.pack()) == header


# --- the stream -----------------------------------------------------------------------------------


def test_doctests_hold():
    assert doctest.testmod(stream).failed == 0


def test_no_rate_is_no_limit():
    assert Bucket(0).take(10**12, 1.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=50))
def test_over_any_time_it_is_the_rate_and_what_was_saved_up(takes):
    bucket, now, taken, rate = Bucket(1000), 0.0, 0, 1000
    for size, pause in takes:
        now += pause
        now += bucket.take(size, now)
        taken += size
        assert taken <= rate * now + rate * BURST + 1


def test_time_that_passes_unused_is_not_saved_up_without_end():
    bucket = Bucket(1000)
    bucket.take(0, 0.0)
    assert bucket.take(1000, 100.0) == pytest.approx(1 - BURST)


def test_stream_ends_when_the_tls_peer_says_goodbye_and_stays_connected(tmp_path):
    authority = Authority(tmp_path, "ours")
    issued = authority.issue("node")
    shown = credentials.load(
        LaunchConfig(rdzv_tls_cert=issued.cert, rdzv_tls_key=issued.key, rdzv_tls_ca=authority.cert)
    )
    ours, theirs = socket.socketpair()
    stream = SnapshotStream(ours, TlsPipe(shown.server_tls, server=True))
    with theirs, contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        received = pool.submit(stream.receive, 4)
        theirs.settimeout(30)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = shown.client_tls.wrap_bio(incoming, outgoing)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                theirs.sendall(outgoing.read())
                incoming.write(theirs.recv(65536))
        client.write(b"last words")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.unwrap()
        theirs.sendall(outgoing.read())
        assert received.result(30) == b"last"
        assert stream.receive(6) == b" words"
        with pytest.raises(EOFError):
            stream.receive(1)
