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

from tests.unit.rendezvous.cast import connected, serving, story, within
from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.transport.connect import Endpoint

SCRIPT = Path(__file__).with_name("store_process.py")
PATIENCE = 25.0


@contextlib.contextmanager
def member_of(port: int, lease: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), str(port), "member/1", str(lease)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@story
async def test_a_killed_member_is_gone_long_before_its_lease_ends():
    async with serving() as server, connected(server.port) as watcher:
        changes = watcher.watch("member/", after=0)
        with member_of(server.port, 60) as member:
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
        with member_of(server.port, lease) as member:
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
    """The member's words about its lease in its first answers of this revision or later."""
    verdicts: list[str] = []
    while len(verdicts) < 3:
        at, verdict = line(member).split()
        if int(at) >= revision:
            verdicts.append(verdict)
    return set(verdicts)


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
