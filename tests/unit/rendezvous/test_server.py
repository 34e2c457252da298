"""The server against raw bytes and bad clients; what clients see is in the contract test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rendezvous.cast import JOB, a_few_examples, connected, serving, soon, story, within
from tests.unit.transport.cast import Stranger
from torchelastic.errors import WireError
from torchelastic.rendezvous.embedded import EmbeddedServer, EmbeddedStore
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
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


# --- table ----------------------------------------------------------------------------------------

# The table where it differs from other stores: leases, history. The contract test has the rest.

NEVER = 1e9


def filled(table: Table, *keys: str) -> Table:
    for key in keys:
        table.put(key, "{}")
    return table


def with_lease(*keys: str, seconds: float = 3.0, now: float = 0.0) -> Table:
    table = Table()
    table.open_lease("L", seconds, now)
    for key in keys:
        table.put(key, "{}", lease="L")
    return table


@pytest.mark.parametrize(
    ("kept_at", "now", "alive"),
    [
        (None, 2.9, True),
        (None, 3.0, False),
        (2.0, 4.9, True),
        (2.0, 5.0, False),
        # Late, but nobody had ended it yet.
        (7.0, 9.9, True),
    ],
)
def test_a_lease_lasts_from_its_last_keep_alive(kept_at, now, alive):
    table = with_lease("a", seconds=3.0)
    if kept_at is not None:
        assert table.keep_alive("L", kept_at)
    ended = table.expire(now)
    assert (ended == {}) is alive
    assert [row.key for row in table.get("")] == (["a"] if alive else [])
    assert table.keep_alive("L", now) is alive


def test_the_end_of_a_lease_deletes_its_keys_in_the_order_they_were_put():
    table = with_lease("b", "a")
    table.put("kept", "{}")
    assert table.expire(NEVER) == {"L": [Row("b", None, 1, 4), Row("a", None, 2, 5)]}
    assert [row.key for row in table.get("")] == ["kept"]
    assert table.expire(NEVER) == {}


def test_deadlines_are_not_kept_for_ever():
    table = with_lease()
    for now in range(100):  # a client whose connection breaks again and again
        table.shorten("L", now + 0.05)
        assert table.keep_alive("L", now)
        assert table.next_deadline() == now + 3.0
    assert len(table._deadlines) < 10


@a_few_examples
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "keep", "shorten", "end"]),
            st.sampled_from("ABC"),
            st.integers(0, 9),
        )
    )
)
def test_the_next_deadline_is_the_earliest_of_all(moves):
    table, deadlines, now = Table(), {}, 0.0
    for move, token, seconds in moves:
        now += 1.0
        if move == "open":
            table.open_lease(token, seconds + 1.0, now)
            deadlines[token] = (now + seconds + 1.0, seconds + 1.0)
        elif move == "keep" and table.keep_alive(token, now):
            deadlines[token] = (now + deadlines[token][1], deadlines[token][1])
        elif move == "shorten" and token in deadlines:
            table.shorten(token, now + seconds)
            deadlines[token] = (min(deadlines[token][0], now + seconds), deadlines[token][1])
        elif move == "end":
            table.end_lease(token)
            deadlines.pop(token, None)
        due = {token for token, (deadline, _) in deadlines.items() if deadline <= now}
        assert set(table.expire(now)) == due
        deadlines = {token: facts for token, facts in deadlines.items() if token not in due}
        assert table.next_deadline() == min((at for at, _ in deadlines.values()), default=None)


def test_a_lease_opened_twice_is_one_lease():
    table = with_lease("a")
    table.open_lease("L", 4.0, 1.0)
    assert table.next_deadline() == 5.0
    assert [row.key for row in table.end_lease("L")] == ["a"]


@pytest.mark.parametrize(("next_lease", "left"), [(None, ["a"]), ("M", ["a"]), ("L", [])])
def test_a_key_belongs_to_the_lease_it_was_last_put_under(next_lease, left):
    table = with_lease("a")
    table.open_lease("M", 3.0, 0.0)
    table.put("a", "{}", lease=next_lease)
    table.end_lease("L")
    assert [row.key for row in table.get("")] == left


def test_unknown_leases_are_ignored():
    table = Table()
    table.shorten("?", 1.0)
    assert not table.keep_alive("?", 0.0)
    assert table.end_lease("?") == []


# ChangeHistory


def test_changes_since_a_revision_come_in_order():
    table = with_lease("m/1", "x", "m/2", "m/1")
    table.end_lease("L")
    changes = table.since("m/", 1)
    assert changes is not None
    assert [(row.key, row.text is None, row.modified) for row in changes] == [
        ("m/2", False, 3),
        ("m/1", False, 4),
        ("m/1", True, 5),
        ("m/2", True, 7),
    ]
    assert table.since("m/", 7) == []


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("", ["member/1", "world", "member/2", "worldly", "member/1"]),
        ("member/", ["member/1", "member/2", "member/1"]),
        ("member/1", ["member/1", "member/1"]),
        ("world", ["world", "worldly"]),
        ("worldl", ["worldly"]),
        ("w/", []),
    ],
)
def test_changes_under_a_prefix_whatever_it_ends_in(prefix, keys):
    table = filled(Table(), "first", "member/1", "world", "member/2", "worldly", "member/1")
    changes = table.since(prefix, 1)
    assert changes is not None
    assert [row.key for row in changes] == keys
    there = [row.key for row in table.get(prefix) if row.key != "first"]
    assert there == list(dict.fromkeys(keys)), "in order of arrival"


def test_table_watch_beyond_the_history_receives_the_last_change_of_each_key():
    table = Table(history_rows=2)
    table.open_lease("L", 3.0, 0.0)
    table.put("gone", "{}", lease="L")
    filled(table, "a", "b", "a")
    table.end_lease("L")
    changes = table.since("", 1)
    assert changes is not None
    assert [(row.key, row.text) for row in changes] == [("b", "{}"), ("a", "{}"), ("gone", None)]


def test_the_history_is_bounded_by_characters_too():
    table = Table(history_rows=100, history_chars=100)
    for _ in range(10):
        table.put("a", "x" * 60)
    changes = table.since("", 0)
    assert changes is not None
    assert [row.modified for row in changes] == [10]


def test_a_watcher_that_missed_forgotten_deletions_gets_none():
    table = Table(history_rows=1, tombstones=1)
    table.open_lease("L", 3.0, 0.0)
    for key in ("a", "b"):
        table.put(key, "{}", lease="L")
    table.end_lease("L")
    assert table.since("", 2) is None
    assert table.since("", 3) == [Row("b", None, 2, 4)]
    # Who knew nothing has missed nothing.
    assert table.since("", 0) == [Row("b", None, 2, 4)]


def test_a_request_that_comes_again_is_known_by_its_stamp():
    table = Table(history_rows=2)
    table.put("a", "{}", beside={"part/0": "[]"}, stamp="me/1")
    assert table.revision_of("me/1") == table.revision == 2
    assert table.revision_of("me/2") is None
    filled(table, "b", "c")
    assert table.revision_of("me/1") is None


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "leased", "end"])), max_size=30
)


@a_few_examples
@given(steps=STEPS, history=st.integers(0, 8), watched_from=st.integers(0, 30))
def test_a_watcher_who_was_away_ends_up_with_what_is_there(steps, history, watched_from):
    table = Table(history_rows=history)
    known: dict[str, Row] = {}
    seen = 0
    for number, (key, action) in enumerate(steps):
        if action == "end":
            table.end_lease("L")
        else:
            table.open_lease("L", 1.0, 0.0)
            table.put(key, str(number), lease="L" if action == "leased" else None)
        if number == watched_from:
            known, seen = {row.key: row for row in table.get("")}, table.revision
    changes = table.since("", seen)
    assert changes is not None
    assert [row.modified for row in changes] == sorted({row.modified for row in changes})
    for row in changes:
        if row.text is None:
            known.pop(row.key, None)
        else:
            known[row.key] = row
    assert known == {row.key: row for row in table.get("")}
