"""A member of a job as a process: `store_member.py PORT KEY LEASE_SECONDS`.

Holds a leased key and asks for the store's revision over and over, printing what it got and
whether it still believes in its lease. Ends when the store is lost.
"""

from __future__ import annotations

import asyncio
import sys

from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous.embedded import EmbeddedStore
from torchelastic.transport.connect import Endpoint


async def main(port: int, key: str, seconds: float) -> None:
    store = await EmbeddedStore.connect([Endpoint("localhost", port, "job-1")], timeout=20)
    await store.open_lease(seconds)
    await store.put(key, {}, leased=True)
    try:
        while True:
            revision = (await store.get("marker")).revision
            print(revision, "lost" if store.lease_lost.is_set() else "held", flush=True)
            await asyncio.sleep(0.02)
    except RendezvousLost as error:
        print("end", error, flush=True)
    await store.close()


asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
