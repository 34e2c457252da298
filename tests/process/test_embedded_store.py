"""The embedded store between processes that are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.unit.rendezvous.cast import connected, serving, story, within
from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.transport.connect import Endpoint

SCRIPT = Path(__file__).with_name("store_process.py")
PATIENCE = 25.0


@contextlib.contextmanager
def process(role: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), role, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with child:
            try:
                yield child
            finally:
                child.kill()
    finally:
        assert child.returncode is not None


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@story
async def test_a_killed_member_is_gone_long_before_its_lease_ends():
    async with serving() as server, connected(server.port) as watcher:
        changes = watcher.watch("member/", after=0)
        with process("member", server.port, "member/1", 60) as member:
            await within(PATIENCE, changes.__anext__())
            member.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            gone = await within(PATIENCE, changes.__anext__())
            assert (gone.key, gone.item) == ("member/1", None)
            assert time.monotonic() - killed < 30.0


@story
async def test_a_frozen_member_is_gone_after_its_lease_and_knows_it_first():
    lease = 2.0  # long enough not to be lost on a busy machine

    async with serving() as server, connected(server.port) as watcher:
        changes = watcher.watch("member/", after=0)
        with process("member", server.port, "member/1", lease) as member:
            await within(PATIENCE, changes.__anext__())
            member.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            gone = await within(PATIENCE, changes.__anext__())
            assert gone.item is None
            assert time.monotonic() - stopped > lease / 2
            marker = await watcher.put("marker", {})
            member.send_signal(signal.SIGCONT)
            verdicts = await asyncio.to_thread(verdicts_since, member, marker)
            assert verdicts == {"lost"}


def verdicts_since(member: subprocess.Popen[str], revision: int) -> set[str]:
    """What the member said of its lease in its first answers of this revision or later."""
    verdicts: list[str] = []
    while len(verdicts) < 3:
        at, verdict = line(member).split()
        if int(at) >= revision:
            verdicts.append(verdict)
    return set(verdicts)


def test_a_killed_host_is_lost_after_the_lease():
    with process("host") as host:
        port = int(line(host))
        with process("member", port, "member/1", 3.0) as member:
            assert line(member).endswith("held")
            host.kill()
            started = time.monotonic()
            said = line(member)
            while not said.startswith("end"):
                said = line(member)
            assert "its host has exited" in said
            assert time.monotonic() - started > 0.3
            assert member.wait(PATIENCE) == 0


@story
async def test_a_host_that_ends_orderly_says_so():
    with process("host") as host:
        async with connected(int(line(host))) as store:
            changes = store.watch("", after=0)
            waiting = asyncio.ensure_future(changes.__anext__())
            await store.get("")
            assert host.stdin is not None
            host.stdin.close()
            with pytest.raises(RendezvousLost, match="has exited"):
                await within(PATIENCE, waiting)
        assert host.wait(PATIENCE) == 0


def test_members_may_come_before_their_host():
    port = free_port()
    with (
        process("member", port, "member/1", 5) as early,
        process("host", port) as host,
    ):
        assert line(host) == str(port)
        assert line(early).endswith("held")


@story
async def test_two_hundred_members_join_at_once():
    count = 200

    async def join(port: int, number: int) -> EmbeddedStore:
        store = await EmbeddedStore.connect(
            [Endpoint("localhost", port, "job-1")], timeout=PATIENCE
        )
        await store.open_lease(60.0)
        await store.put(f"member/{number}", {"node": number}, leased=True)
        return store

    async with serving() as server, connected(server.port) as leader:
        changes = leader.watch("member/", after=0)
        members = await asyncio.gather(*(join(server.port, n) for n in range(count)))
        seen = {(await within(PATIENCE, changes.__anext__())).key for _ in range(count)}
        assert len(seen) == count
        worlds = [member.watch("world", after=0) for member in members]
        await leader.put("world", {"generation": 0})
        for world in worlds:
            assert (await within(PATIENCE, world.__anext__())).item.value["generation"] == 0
        for member in members:
            await member.close()
        assert await server.wait_alone(PATIENCE, own=1)
