"""The host of a store, or a member of a job, as a process.

    store_process.py host [PORT]

prints its port, and ends with its stdin.

    store_process.py member PORT KEY LEASE_SECONDS

holds a leased key and asks for the store's revision over and over, printing what it got and whether
it still believes in its lease. It ends when the store is lost.
"""

from __future__ import annotations

import asyncio
import sys

from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous.embedded import EmbeddedServer, EmbeddedStore
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint


async def host(port: str = "0") -> None:
    sockets = bind_endpoint("localhost", int(port))
    assert sockets is not None
    server = EmbeddedServer("job-1")
    print(await server.start(sockets), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


async def member(port: str, key: str, seconds: str) -> None:
    store = await EmbeddedStore.connect([Endpoint("localhost", int(port), "job-1")], timeout=20)
    await store.open_lease(float(seconds))
    await store.put(key, {}, leased=True)
    try:
        while True:
            revision = (await store.get("marker")).revision
            print(revision, "lost" if store.lease_lost.is_set() else "held", flush=True)
            await asyncio.sleep(0.02)
    except RendezvousLost as error:
        print("end", error, flush=True)
    await store.close()


asyncio.run({"host": host, "member": member}[sys.argv[1]](*sys.argv[2:]))
