"""Where the nodes meet: the store at the endpoint, hosted here if this node can bind it."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig, parse_endpoint
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.server import EmbeddedServer, bind_endpoint

PRIVATE_ENDPOINT = "127.0.0.1:0"


@dataclass(frozen=True)
class Meeting:
    """This node's connection to the store, and the store itself where it is hosted here."""

    store: EmbeddedStore
    server: EmbeddedServer | None
    #: Where other nodes reach this one.
    addr: str
    endpoint: str

    async def close(self, others: float) -> None:
        """Go; a host gives the other nodes up to `others` seconds to go first."""
        await self.store.close()
        if self.server is not None:
            if others:
                await self.server.wait_alone(others)
            await self.server.close()


async def meet(config: LaunchConfig, clock: Clock) -> Meeting:
    """Host the store or wait for its host, whichever this node is."""
    host, port = parse_endpoint(config.rdzv_endpoint or PRIVATE_ENDPOINT)
    sockets = bind_endpoint(host, port)
    server = None
    if sockets is not None:
        server = EmbeddedServer(config.run_id, clock=clock)
        port = await server.start(sockets)
    store = await EmbeddedStore.connect(
        host, port, config.run_id, timeout=config.wait_for_nodes or None
    )
    # Peers reach the host where they reach the endpoint; its own connection may be a loopback one.
    addr = config.local_addr or (host if server is not None else store.local_addr)
    return Meeting(store, server, addr, f"{host}:{port}")
