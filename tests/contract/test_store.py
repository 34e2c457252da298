"""The promises of every store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.etcd import Etcd
from tests.support import FakeClock
from tests.unit.rendezvous.cast import JOB, run, serving, within
from torchelastic.clock import Clock, SystemClock
from torchelastic.errors import LeaseExpired, RendezvousLost
from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.settings import EtcdSettings
from torchelastic.rendezvous.store import Change, Store
from torchelastic.transport.connect import Endpoint

#: Opens one more connection to the store; the clock is what that client tells the time by.
Connect = Callable[..., "asyncio.Future[Store]"]
Backend = Callable[[], AbstractAsyncContextManager[Connect]]

PATIENCE = 10.0


async def take(changes: AsyncIterator[Change], count: int) -> list[Change]:
    return [await within(PATIENCE, changes.__anext__()) for _ in range(count)]


def told(changes: list[Change]) -> list[tuple[str, object]]:
    return [(change.key, change.item and change.item.value) for change in changes]


def story(told: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine that is given `connect`."""

    @functools.wraps(told)
    def test(self: StoreContract, backend: Backend) -> None:
        async def whole() -> None:
            async with backend() as connect:
                await told(self, connect)

        run(whole())

    del test.__wrapped__  # pytest is to give it `backend`
    return test


class StoreContract:
    """Subclass it, with a `backend` fixture, for every implementation of `Store`."""

    #: As short as the implementation allows.
    lease_seconds = 0.6

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError

    @story
    async def test_put_is_seen_by_another_client(self, connect):
        one, other = await connect(), await connect()
        assert one.local_addr
        assert (await one.get("")).items == {}
        value = {"name": "é\n\"'", "numbers": [1, 2.5, None, True], "deep": {"x": {}}}
        revision = await one.put("a/1", value)
        await one.put("b/1", {})
        listing = await other.get("a/")
        assert list(listing.items) == ["a/1"]
        assert listing.items["a/1"].value == value
        assert listing.items["a/1"].modified == revision
        assert listing.revision > revision

    @story
    async def test_created_stays_and_modified_moves(self, connect):
        store = await connect()
        first = await store.put("a", {"n": 1})
        between = await store.put("b", {})
        second = await store.put("a", {"n": 2})
        item = (await store.get("a")).items["a"]
        assert (item.created, item.modified) == (first, second)
        assert first < between < second

    @story
    async def test_compare_and_set_needs_the_last_revision(self, connect):
        store = await connect()
        first = await store.compare_and_set("a", {"n": 1}, expected=0)
        assert first is not None
        await store.put("b", {})
        assert await store.compare_and_set("a", {"n": 2}, expected=0) is None
        second = await store.compare_and_set("a", {"n": 2}, expected=first)
        assert second is not None
        assert second > first
        assert await store.compare_and_set("a", {"n": 3}, expected=first) is None
        assert (await store.get("a")).items["a"].value == {"n": 2}

    @story
    async def test_compare_and_set_writes_all_keys_or_none(self, connect):
        writer, reader = await connect(), await connect()
        await writer.open_lease(60.0)
        created = await writer.put("leader", {"n": 1}, leased=True)
        elected = await writer.put("leader", {"n": 2}, leased=True)
        changes = reader.watch("world", after=created)

        async def publish(n: int, expected: int, provided: tuple[str, int]) -> int | None:
            parts = {"part/0": {"n": n}, "part/1": {"n": n}}
            return await writer.compare_and_set(
                "world", {"n": n}, expected=expected, beside=parts, provided=provided
            )

        first = await publish(1, 0, ("leader", elected))
        assert first is not None
        assert await publish(2, 0, ("leader", elected)) is None
        assert await publish(2, first, ("leader", created)) is None
        assert await publish(2, first, ("nobody", created)) is None
        listing = await reader.get("part/")
        values = {key: item.value for key, item in listing.items.items()}
        assert values == {"part/0": {"n": 1}, "part/1": {"n": 1}}

        second = await publish(2, first, ("leader", elected))
        seen = await take(changes, 2)
        assert told(seen) == [("world", {"n": 1}), ("world", {"n": 2})]
        assert [change.revision for change in seen] == [first, second]
        assert (await reader.get("part/1")).items["part/1"].value == {"n": 2}
        # The leader goes: who holds on to its key can set nothing any more.
        await writer.open_lease(60.0)
        assert await publish(3, second, ("leader", elected)) is None
        assert sorted((await reader.get("")).items) == ["part/0", "part/1", "world"]

    @story
    async def test_the_end_of_the_lease_is_told_at_once_and_after_every_renewal(self, connect):
        store = await connect()
        told: list[float] = []
        store.tell_lease(told.append)
        assert told == []
        await store.open_lease(60.0)
        store.tell_lease(told.append)  # as of a store that was opened with a lease
        await store.keep_alive()
        assert len(told) >= 3
        assert told == sorted(told)

    @story
    async def test_compare_and_set_puts_all_keys_under_the_lease(self, connect):
        store = await connect()
        await store.open_lease(60.0)
        both = {"member/a": {"n": 1}, "part/a": {}}
        assert await store.compare_and_set("name/a", {}, expected=0, leased=True, beside=both)
        await store.put("member/a", {"n": 2}, leased=True)
        assert (await store.get("member/")).items["member/a"].value == {"n": 2}
        await store.open_lease(60.0)
        assert (await store.get("")).items == {}

    @story
    async def test_compare_and_set_of_many_at_once_has_one_winner(self, connect):
        stores = [await connect() for _ in range(8)]
        results = await asyncio.gather(
            *(
                store.compare_and_set("leader", {"n": n}, expected=0)
                for n, store in enumerate(stores)
            )
        )
        winners = [n for n, revision in enumerate(results) if revision is not None]
        assert len(winners) == 1
        assert (await stores[0].get("leader")).items["leader"].value == {"n": winners[0]}

    @story
    async def test_watching_tells_every_change_in_order(self, connect):
        writer, watcher = await connect(), await connect()
        await writer.put("a/0", {"n": 0})
        start = (await watcher.get("a/")).revision
        changes = watcher.watch("a/", after=start)
        for n in range(1, 20):
            await writer.put(f"a/{n % 3}", {"n": n})
            await writer.put("other", {"n": n})
        seen = await take(changes, 19)
        assert told(seen) == [(f"a/{n % 3}", {"n": n}) for n in range(1, 20)]
        revisions = [change.revision for change in seen]
        assert revisions == sorted(set(revisions))
        assert all(change.item.modified == change.revision for change in seen)

    @story
    async def test_watching_from_an_old_revision(self, connect):
        store = await connect()
        first = await store.put("a", {"n": 1})
        await store.put("a", {"n": 2})
        await store.put("b", {"n": 3})
        changes = store.watch("", after=first)
        assert told(await take(changes, 2)) == [("a", {"n": 2}), ("b", {"n": 3})]
        await store.put("a", {"n": 4})
        assert told(await take(changes, 1)) == [("a", {"n": 4})]

    @story
    async def test_following_a_key_begins_with_what_is_there(self, connect):
        writer, reader = await connect(), await connect()
        await writer.put("worldly", {"n": 0})
        async with contextlib.aclosing(reader.follow("world")) as values:
            assert await within(PATIENCE, anext(values)) is None
            await writer.open_lease(60.0)
            first = await writer.put("world", {"n": 1}, leased=True)
            await writer.put("worldly", {"n": 2})
            last = await writer.put("world", {"n": 3}, leased=True)
            items = [await within(PATIENCE, anext(values)) for _ in range(2)]
            assert [item.value for item in items] == [{"n": 1}, {"n": 3}]
            assert [item.created for item in items] == [first, first]
            async with contextlib.aclosing(reader.follow("world")) as others:
                item = await within(PATIENCE, anext(others))
                assert (item.value, item.modified) == ({"n": 3}, last)
            await writer.open_lease(60.0)
            assert await within(PATIENCE, anext(values)) is None

    @story
    async def test_the_latest_of_a_key_is_as_new_as_what_was_reported(self, connect):
        writer, reader = await connect(), await connect()
        assert await within(PATIENCE, reader.latest("part/1")) is None
        revision = 0
        async with contextlib.aclosing(reader.follow("world")) as worlds:
            await within(PATIENCE, anext(worlds))
            for n in range(5):
                beside = {"part/1": {"n": n}, "part/2": {"n": -n}}
                revision = await writer.compare_and_set(
                    "world", {"n": n}, expected=revision, beside=beside
                )
                assert (await within(PATIENCE, anext(worlds))).value == {"n": n}
                parts = [await reader.latest(key) for key in ("part/1", "part/2")]
                assert [part.value for part in parts] == [{"n": n}, {"n": -n}]
                assert (await reader.latest("part/2")).value == {"n": -n}

    @story
    async def test_several_watches_of_one_connection(self, connect):
        store = await connect()
        first = await store.put("a/1", {"n": 1})
        early = store.watch("a/", after=0)
        assert told(await take(early, 1)) == [("a/1", {"n": 1})]
        late, all_of_it = store.watch("a/", after=first), store.watch("", after=0)
        await store.put("a/2", {"n": 2})
        assert told(await take(early, 1)) == [("a/2", {"n": 2})]
        assert told(await take(late, 1)) == [("a/2", {"n": 2})]
        assert told(await take(all_of_it, 2)) == [("a/1", {"n": 1}), ("a/2", {"n": 2})]

    @story
    async def test_lease_that_ended_only_on_our_clock_is_held_again(self, connect):
        store, other = await connect(), await connect()
        assert not await store.resume_lease(60.0)
        await store.open_lease(60.0)
        created = await store.put("member/a", {"n": 1}, leased=True)
        store._lease.end()  # as after this process stood still
        assert store.lease_lost.is_set()
        assert await store.resume_lease(60.0)
        assert not store.lease_lost.is_set()
        await store.put("member/a", {"n": 2}, leased=True)
        found = (await other.get("member/")).items["member/a"]
        assert (found.value, found.created) == ({"n": 2}, created)
        await other.give_up("member/a", created=created)
        await within(PATIENCE, store.lease_lost.wait())
        assert not await store.resume_lease(60.0)

    @story
    async def test_closing_deletes_leased_keys_at_once(self, connect):
        leaver, other = await connect(), await connect()
        await leaver.open_lease(60.0)
        await leaver.put("member/1", {}, leased=True)
        await leaver.put("kept", {}, leased=True)
        await other.put("kept", {})  # without the lease: it outlives that
        changes = other.watch("member/", after=0)
        await take(changes, 1)
        await leaver.close()
        (gone,) = await take(changes, 1)
        assert (gone.key, gone.item) == ("member/1", None)
        listing = await other.get("")
        assert list(listing.items) == ["kept"]
        assert listing.revision >= gone.revision

    @story
    async def test_a_lease_is_kept_by_itself(self, connect):
        holder, other = await connect(), await connect()
        await holder.open_lease(3 * self.lease_seconds)  # long, for a busy machine
        await holder.put("member/1", {}, leased=True)
        changes = other.watch("member/", after=0)
        await take(changes, 1)
        with pytest.raises(asyncio.TimeoutError):
            await within(3.5 * self.lease_seconds, changes.__anext__())
        assert await holder.keep_alive()
        assert not holder.lease_lost.is_set()

    @story
    async def test_a_lease_that_is_not_kept_ends(self, connect):
        clock = FakeClock()
        holder, other = await connect(clock=clock), await connect()
        lease = 3 * self.lease_seconds  # long, for a busy machine
        await holder.open_lease(lease)
        await holder.put("member/1", {}, leased=True)
        changes = other.watch("member/", after=0)
        await take(changes, 1)
        # As after a stop of the process: it finds that it has missed its time.
        clock.advance(lease)
        assert not await holder.keep_alive()
        assert holder.lease_lost.is_set()
        assert told(await take(changes, 1)) == [("member/1", None)]
        with pytest.raises(LeaseExpired):
            await holder.put("member/1", {}, leased=True)
        with pytest.raises(LeaseExpired):
            await holder.compare_and_set("member/1", {}, expected=0, leased=True)
        await holder.put("unleased", {})

    @story
    async def test_a_lease_can_be_opened_again(self, connect):
        clock = FakeClock()
        holder, other = await connect(clock=clock), await connect()
        await holder.open_lease(60.0)
        await holder.put("member/1", {"n": 1}, leased=True)
        clock.advance(60.0)
        assert not await holder.keep_alive()
        await holder.open_lease(60.0)
        assert not holder.lease_lost.is_set()
        assert await holder.keep_alive()
        # What was under the old lease is gone, though its time was not up at the store.
        assert (await other.get("")).items == {}
        await holder.put("member/1", {"n": 2}, leased=True)
        assert list((await other.get("")).items) == ["member/1"]

    @story
    async def test_reports_are_heard_in_order_and_before_what_is_asked_later(self, connect):
        reporter, other = await connect(), await connect()
        await reporter.open_lease(60.0)
        changes = other.watch("member/", after=0)
        for n in range(5):
            await reporter.report("member/1", {"n": n})
        held = (await reporter.get("member/")).items["member/1"]
        assert held.value == {"n": 4}
        seen = [change.item.value["n"] for change in await take(changes, 5)]
        assert seen == [0, 1, 2, 3, 4]
        await reporter.close()
        assert told(await take(changes, 1)) == [("member/1", None)]

    @story
    async def test_leased_put_without_a_lease_is_refused(self, connect):
        store = await connect()
        assert not await store.keep_alive()
        for verb in (store.put("a", {}, leased=True), store.report("a", {})):
            with pytest.raises(LeaseExpired, match="'a' was not written"):
                await verb

    @story
    async def test_a_leader_that_was_paused_changes_nothing(self, connect):
        clock = FakeClock()
        paused, other = await connect(clock=clock), await connect()
        lease = 3 * self.lease_seconds  # long, for a busy machine
        await paused.open_lease(lease)
        await other.open_lease(60.0)
        elected = await paused.compare_and_set("leader", {}, expected=0, leased=True)
        fence = ("leader", elected)
        first = await paused.compare_and_set("world", {"n": 0}, expected=0, provided=fence)
        changes = other.watch("leader", after=elected)
        clock.advance(lease)
        assert not await paused.keep_alive()
        assert told(await take(changes, 1)) == [("leader", None)]

        async def publish(n, fence):
            """Without a look at the lease: as what was on its way when it stopped."""
            return await paused.compare_and_set(
                "world", {"n": n}, expected=first, beside={"part/0": {}}, provided=fence
            )

        assert await publish(1, fence) is None
        now = await other.compare_and_set("leader", {}, expected=0, leased=True)
        assert await publish(1, fence) is None
        assert (await other.get("world")).items["world"].value == {"n": 0}
        assert (await other.get("part/")).items == {}
        assert await publish(2, ("leader", now)) is not None

    @story
    async def test_a_member_that_is_given_up_learns_it_and_loses_its_keys(self, connect):
        leader, lost = await connect(), await connect()
        for store in (leader, lost):
            await store.open_lease(60.0)
        fence = ("leader", await leader.put("leader", {}, leased=True))
        created = await lost.put("member/1", {"n": 1}, leased=True)
        await lost.put("name/x", {}, leased=True)
        await lost.put("member/1", {"n": 2}, leased=True)
        changes = leader.watch("member/", after=created)
        assert told(await take(changes, 1)) == [("member/1", {"n": 2})]
        # None of these is so.
        await leader.give_up("member/1", created=created + 1, provided=fence)
        await leader.give_up("member/1", created=created, provided=("leader", fence[1] + 1))
        await leader.give_up("member/1", created=created, provided=("nobody", 1))
        await leader.give_up("member/2", created=created)
        assert await lost.keep_alive()
        await leader.give_up("member/1", created=created, provided=fence)
        assert told(await take(changes, 1)) == [("member/1", None)]
        assert list((await leader.get("")).items) == ["leader"]
        with pytest.raises(LeaseExpired):
            await lost.put("member/1", {}, leased=True)
        assert lost.lease_lost.is_set()
        await leader.give_up("member/1", created=created, provided=fence)
        assert await leader.keep_alive()

    @story
    async def test_after_closing_every_verb_says_so(self, connect):
        store = await connect()
        changes = store.watch("", after=0)
        waiting = asyncio.ensure_future(changes.__anext__())
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        for verb in (
            waiting,
            store.get(""),
            store.put("a", {}),
            store.compare_and_set("a", {}, expected=0),
            store.keep_alive(),
            store.open_lease(1.0),
            store.watch("", after=0).__anext__(),
        ):
            with pytest.raises(RendezvousLost, match="closed"):
                await verb


class TestEmbedded(StoreContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return embedded


@contextlib.asynccontextmanager
async def embedded() -> AsyncIterator[Connect]:
    stores: list[EmbeddedStore] = []
    async with serving() as server:

        async def connect(clock: Clock | None = None) -> EmbeddedStore:
            store = await EmbeddedStore.connect(
                [Endpoint("localhost", server.port, JOB)],
                timeout=PATIENCE,
                clock=clock or SystemClock(),
            )
            stores.append(store)
            return store

        yield connect
        for store in stores:
            await store.close()


class TestEtcd(StoreContract):
    lease_seconds = 1.0

    @pytest.fixture
    def backend(self, etcd: Etcd) -> Backend:
        return lambda: at_etcd(etcd)


@contextlib.asynccontextmanager
async def at_etcd(etcd: Etcd) -> AsyncIterator[Connect]:
    stores: list[EtcdStore] = []
    job = secrets.token_hex(4)

    async def connect(clock: Clock | None = None) -> EtcdStore:
        store = await EtcdStore.connect(
            [("localhost", etcd.port)],
            job,
            timeout=PATIENCE,
            settings=EtcdSettings(outage=0.0),
            clock=clock or SystemClock(),
        )
        stores.append(store)
        return store

    yield connect
    for store in stores:
        await store.close()
