"""The host of a store as a process: `store_host.py PORT`. Prints its port, ends with its stdin."""

from __future__ import annotations

import asyncio
import sys

from torchelastic.rendezvous.embedded import EmbeddedServer
from torchelastic.transport.addresses import bind_endpoint


async def main(port: int) -> None:
    sockets = bind_endpoint("localhost", port)
    assert sockets is not None
    server = EmbeddedServer("job-1")
    print(await server.start(sockets), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


asyncio.run(main(int(sys.argv[1])))
