"""A member of a job as a process: `store_process.py PORT KEY LEASE_SECONDS`.

It holds a leased key and asks for the store's revision over and over, printing what it got and
whether it still believes in its lease.
"""

from __future__ import annotations

import asyncio
import sys

from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.transport.connect import Endpoint


async def member(port: str, key: str, seconds: str) -> None:
    store = await EmbeddedStore.connect([Endpoint("localhost", int(port), "job-1")], timeout=20)
    await store.open_lease(float(seconds))
    await store.put(key, {}, leased=True)
    while True:
        revision = (await store.get("marker")).revision
        print(revision, "lost" if store.lease_lost.is_set() else "held", flush=True)
        await asyncio.sleep(0.02)


asyncio.run(member(*sys.argv[1:]))
