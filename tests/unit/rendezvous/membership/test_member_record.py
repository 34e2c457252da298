"""A node's record in a real store: its name, and what is put when."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice

from tests.unit.agent.support import in_loop
from tests.unit.rendezvous.embedded_support import connected, serving, soon
from torchelastic.rendezvous.membership.member_session import NEIGHBOURS, MemberRecord, _numbers
from torchelastic.rendezvous.world import Member


def member(node: str) -> Member:
    return Member(node=node, name="", addr="10.0.0.1", nproc=2)


async def record(store, node: str) -> Member:
    return Member.from_json((await store.get(f"member/{node}")).items[f"member/{node}"].value)


@in_loop
async def test_agents_of_one_host_are_told_apart_by_numbers():
    async with serving() as server:
        names = []
        async with contextlib.AsyncExitStack() as stack:
            for node in "abc":
                store = await stack.enter_async_context(connected(server.port))
                await store.open_lease(60.0)
                membership = MemberRecord(member(node))
                await membership.enlist(store, "host")
                names.append(membership.member.name)
                assert (await record(store, node)).name == names[-1]
        assert names == ["host", "host-2", "host-3"]


@in_loop
async def test_agents_of_one_host_that_join_again_keep_their_names():
    first, second = (MemberRecord(member(node)) for node in "ab")
    async with serving() as server:
        for order in ((first, second), (second, first)):
            async with contextlib.AsyncExitStack() as stack:  # its end is that of the leases
                for membership in order:
                    store = await stack.enter_async_context(connected(server.port))
                    await store.open_lease(60.0)
                    await membership.enlist(store, "host")
            await soon(lambda: server.rows("") == [], "the leases have ended")
            assert (first.member.name, second.member.name) == ("host", "host-2")


def test_the_last_of_thousands_of_one_host_does_not_try_every_number():
    tries = list(islice(_numbers(), NEIGHBOURS + 4))
    assert tries[:NEIGHBOURS] == list(range(1, NEIGHBOURS + 1))
    ends = [NEIGHBOURS**power for power in range(1, 6)]
    for number, start, end in zip(tries[NEIGHBOURS:], ends[:-1], ends[1:], strict=True):
        assert start < number <= end


@in_loop
async def test_a_record_is_put_once_what_it_says_is_kept():
    """What is said meanwhile is put after that, by a record of its own."""
    written = asyncio.Event()
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        membership = MemberRecord(member("a"))
        enlisting = asyncio.create_task(membership.enlist(store, "host", written.wait))
        for _ in range(3):
            await store.keep_alive()
            membership.update(gone=1)
        assert server.rows("") == []
        written.set()
        await enlisting
        assert (await record(store, "a")).gone == -1
        written.clear()
        running = asyncio.create_task(membership.run(store, written.wait))
        await store.keep_alive()
        assert (await record(store, "a")).gone == -1
        written.set()
        await membership.flush(store)
        assert (await record(store, "a")).gone == 1
        running.cancel()
        await asyncio.wait({running})


@in_loop
async def test_a_record_is_put_when_it_differs_from_what_the_store_has():
    async with serving() as server, connected(server.port) as store:
        await store.open_lease(60.0)
        membership = MemberRecord(member("a"))
        await membership.enlist(store, "host")
        running = asyncio.create_task(membership.run(store))
        before = (await store.get("")).revision
        membership.update(ready=False)
        await membership.flush(store)
        assert (await store.get("")).revision == before
        membership.update(ready=True)
        await membership.flush(store)
        assert (await record(store, "a")).ready
        membership.unsaid()
        await membership.flush(store)
        assert (await store.get("")).revision == before + 2
        membership.mention(accepted=3)
        membership.update(gone=2)
        await membership.flush(store)
        said = await record(store, "a")
        assert (said.accepted, said.gone) == (3, 2)
        membership.mention(accepted=4)
        while (await record(store, "a")).accepted != 4:
            await asyncio.sleep(0.01)
        running.cancel()
        await soon(running.done, "the record is put no more")
