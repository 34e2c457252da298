"""How fast a snapshot comes from the memory of one agent into that of another, over loopback.

An agent that comes to a job has it before its workers ask, so their wait does not tell. Here two
processes have what agents have for it, and nothing else to do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchelastic.snapshot.layout import SHARED, Version
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.snapshot.node.replicator import Replicator
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS
from torchelastic.transport.listener import Listener

_JOB = "benchmark"
_VERSION: Version = (0, 1)


def seconds(size: int) -> float:
    """Until so many bytes, which a forked process holds, are held by this one."""
    told, tell = os.pipe()
    wait, stop = os.pipe()
    child = os.fork()
    if not child:
        os.close(stop)
        _hold(size, tell, wait)
    os.close(wait)
    try:
        return asyncio.run(_fetch(f"127.0.0.1:{int(os.read(told, 16))}"))
    finally:
        for descriptor in (told, tell, stop):
            os.close(descriptor)
        os.waitpid(child, 0)


def _hold(size: int, tell: int, wait: int) -> None:
    """The child: never returns. Ends when the other end of `wait` is closed."""
    status = 1
    try:
        asyncio.run(_serve(size, tell, wait))
        status = 0
    finally:
        os._exit(status)


async def _serve(size: int, tell: int, wait: int) -> None:
    async with _node("holder") as (shelf, replicator):
        room = shelf.memory_for(SHARED, size, 100).memory.begin(_VERSION)
        for begin in range(0, size, 1 << 20):
            part = room[begin : begin + (1 << 20)]
            part[:] = b"." * len(part)
        shelf.memory_for(SHARED, size, 100).memory.seal(_VERSION, b"{}", size, 0)
        listener = Listener(_JOB)
        listener.serve(frames.SNAPSHOT, replicator.admit)
        port = await listener.listen(bind_endpoint("127.0.0.1", 0))
        os.write(tell, str(port).encode())
        await asyncio.to_thread(os.read, wait, 1)
        await listener.close()


async def _fetch(peer: str) -> float:
    async with _node("newcomer") as (_, replicator):
        began = time.monotonic()
        await replicator.fetch(SHARED, _VERSION, peer)
        return time.monotonic() - began


@asynccontextmanager
async def _node(name: str) -> AsyncIterator[tuple[SnapshotMemory, Replicator]]:
    shelf = SnapshotMemory()
    replicator = Replicator(shelf, name, _JOB, ANONYMOUS)
    try:
        yield shelf, replicator
    finally:
        await replicator.close()
        shelf.close()
