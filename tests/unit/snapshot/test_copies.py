"""Snapshots on other nodes: what an agent answers, and to whom it brings copies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import doctest
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
from tests.unit.agent.cast import in_loop, place
from torchelastic.config import LaunchConfig
from torchelastic.errors import TransferError
from torchelastic.rendezvous.world import Base, World
from torchelastic.snapshot import layout, messages
from torchelastic.snapshot.layout import SHARED, Memory, own, shard
from torchelastic.snapshot.node import replicator, snapshot_service, stream
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.snapshot.node.replicator import Replicator
from torchelastic.snapshot.node.snapshot_service import Snapshots, chosen_holders, holders
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
        """Write a version, as a worker does."""
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


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


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


@in_loop
async def test_replicator_fetches_a_piece_from_another_node(shown):
    async with node("a", shown) as a, node("b", shown) as b:
        a.write(SHARED, (0, 1))
        a.write(SHARED, (0, 2))
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        b.assert_holds(SHARED, (0, 1))
        await b.replicator.fetch(SHARED, (0, 2), a.peer)
        assert b.held() == [(SHARED, (0, 2), False), (SHARED, (0, 1), False)]
        b.assert_holds(SHARED, (0, 2))


@in_loop
async def test_pieces_are_given_again_and_again_over_one_connection(shown):
    async with node("a", shown) as a, node("b", shown) as b:
        for step in range(1, 5):
            a.write(own(1), (0, step))
            assert await a.replicator.give(own(1), b.peer) == (0, step)
            b.assert_holds(own(1), (0, step))
        assert b.held() == [(own(1), (0, step), True) for step in (4, 3, 2)]
        assert len(b.replicator._visitors) == len(a.replicator._pipes) == 1


@in_loop
async def test_replicator_sends_no_version_twice():
    async with node("a") as a, node("b") as b:
        kept = a.write(own(1), (0, 1))
        await a.replicator.give(own(1), b.peer)
        os.pwrite(kept.descriptor, b"?", kept.sizes.buffer_at(0))  # would not be taken
        assert await a.replicator.give(own(1), b.peer) == (0, 1)


@in_loop
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


@in_loop
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


@in_loop
async def test_the_memory_that_was_fetched_into_is_the_workers_to_write_to():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 1))
        await b.replicator.fetch(SHARED, (0, 1), a.peer)
        assert b.write(SHARED, (1, 2)).memory.find((0, 1)) is not None


@in_loop
async def test_replicator_fetch_of_a_base_voids_later_versions():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 10))
        b.write(SHARED, (0, 11))
        await b.replicator.fetch(SHARED, (0, 10), a.peer)
        assert b.held() == [(SHARED, (0, 10), False)]


@in_loop
async def test_replicator_refuses_an_unknown_piece_and_keeps_the_connection():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 2))
        with pytest.raises(TransferError, match="does not hold that version of 'shared'"):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)
        await b.replicator.fetch(SHARED, (0, 2), a.peer)


@in_loop
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


@in_loop
async def test_bytes_that_were_fetched_are_for_the_worker_to_sum():
    async with node("a") as a, node("b") as b:
        a.write(SHARED, (0, 2), summed=7)
        await b.replicator.fetch(SHARED, (0, 2), a.peer)
        with b.snapshot_memory.reading(SHARED, (0, 2)) as (_, _, held):
            assert not held.is_whole()


@in_loop
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


@in_loop
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
    test_replicator_fetches_a_piece_from_another_node(shown=SECRET)


@in_loop
async def test_a_node_without_room_says_so(monkeypatch):
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 1 << 20, 1 << 20)])
        with pytest.raises(TransferError, match="No room for snapshots of 'own:1'"):
            await a.replicator.give(own(1), b.peer)
        with pytest.raises(NoRoom, match="No room"):
            await b.replicator.fetch(own(1), (0, 1), a.peer)
        assert b.held() == []


@in_loop
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


@pytest.mark.parametrize("end", ["giver", "taker"])
@in_loop
async def test_transfer_ends_at_once_with_either_agent(end):
    async with node("a", bandwidth=5 * stream.CHUNK) as a, node("b") as b:
        a.write(own(1), (0, 1), size=25 * stream.CHUNK)
        giving = asyncio.create_task(a.replicator.give(own(1), b.peer))
        await until(lambda: b.snapshot_memory._kept)
        ending = a if end == "giver" else b
        await asyncio.wait_for(ending.replicator.close(), 10)
        with pytest.raises(TransferError) as lost:
            await asyncio.wait_for(giving, 20)
        assert end == "giver" or "Lost the agent" in str(lost.value)
        assert b.held() == []
        if end == "taker":
            with pytest.raises(TransferError):
                await a.replicator.give(own(1), b.peer)


@in_loop
async def test_replicator_without_a_peer_fails():
    async with node("a") as a:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        for peer in (nobody, "no place at all", ""):
            with pytest.raises(TransferError, match="did not answer"):
                await a.replicator.fetch(SHARED, (0, 1), peer)


@in_loop
async def test_replicator_rejects_a_wrong_secret():
    other = Credentials(Secret(b"another secret, of another job"))
    async with node("a") as a, node("b", other) as b:
        a.write(SHARED, (0, 1))
        with pytest.raises(TransferError, match="different secret"):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)


@in_loop
async def test_connections_to_nodes_that_are_gone_are_closed():
    async with node("a") as a, node("b") as b:
        a.write(own(1), (0, 1))
        await a.replicator.give(own(1), b.peer)
        a.replicator.forget({b.peer})
        assert len(a.replicator._pipes) == 1
        a.replicator.forget(set())
        assert len(a.replicator._pipes) == 0


def hold_serving(monkeypatch):
    """Peers are served when the event that is returned is set."""
    goes_on, serve = threading.Event(), replicator._serve

    def held(peer, snapshot_memory):
        assert goes_on.wait(30)
        serve(peer, snapshot_memory)

    monkeypatch.setattr(replicator, "_serve", held)
    return goes_on


async def rest(one):
    """Who has been served is known to the loop a little later than to the peer."""
    await until(lambda: len(one.replicator._resting) >= len(one.replicator._visitors))


@in_loop
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


@in_loop
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


@in_loop
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
        await until(lambda: not b.replicator._visitors)
        assert await a.replicator.give(own(1), b.peer) == (0, 1)


@pytest.mark.parametrize("name", ["_serve", "_fetch"])
@in_loop
async def test_replicator_closes_on_an_unexpected_message(monkeypatch, name):
    def fails(*_):
        raise RuntimeError("not foreseen")

    async with node("a") as a, node("b") as b:
        unseen = []
        asyncio.get_running_loop().set_exception_handler(lambda _, seen: unseen.append(seen))
        monkeypatch.setattr(replicator, name, fails)
        with pytest.raises((TransferError, RuntimeError)):
            await b.replicator.fetch(SHARED, (0, 1), a.peer)
        await until(lambda: not a.replicator._visitors)
        assert not b.replicator._pipes


@in_loop
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


@in_loop
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
        await until(lambda: len(a.replicator._visitors) == 1)


def test_nonsense_ends_the_connection_or_is_refused_and_harms_nobody(caplog):
    talk_nonsense()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@in_loop
async def test_replicator_closes_on_a_message_before_the_welcome():
    """Bytes right behind the greeting may have been read with it."""
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


def test_replicator_close_leaves_no_thread():
    before = threading.active_count()
    test_replicator_sends_no_version_twice()
    assert threading.active_count() == before


# --- the stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tested", [stream, snapshot_service])
def test_doctests_hold(tested):
    assert doctest.testmod(tested).failed == 0


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


def test_stream_ends_when_the_tls_peer_says_goodbye_and_stays_connected(tls):
    ours, theirs = socket.socketpair()
    stream = SnapshotStream(ours, TlsPipe(tls.server_tls, server=True))
    with theirs, contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        received = pool.submit(stream.receive, 4)
        theirs.settimeout(30)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.client_tls.wrap_bio(incoming, outgoing)
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


# --- what an agent answers about snapshots, and to whom it brings copies --------------------------


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
        await until(lambda: self.memories[own(0)].replicated() == version)

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
    monkeypatch.setattr(snapshot_service, "RETRY_AFTER", 0.01)
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
async def test_a_node_that_takes_no_copy_is_tried_again_and_told_of_once(monkeypatch):
    monkeypatch.setattr(snapshot_service, "RETRY_AFTER", 0.01)
    enough = memory_limit.limits
    async with agents("a", "b") as (a, b):
        in_one_world(a, b)
        _, a.memories[own(0)] = await a.ask(messages.Room(1, own(0), 1000, 100))
        monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 10, 10)])
        await a.write(own(0), (0, 1))
        await until(lambda: a.said)
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
