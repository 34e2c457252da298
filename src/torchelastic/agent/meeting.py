"""Where the nodes meet: the store at the endpoint, hosted here if this node can bind it."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig, parse_endpoint
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.endpoint import bind_endpoint, reachable_address
from torchelastic.rendezvous.embedded.server import EmbeddedServer

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
    server = None
    sockets = bind_endpoint(host, port, is_host=config.is_host)
    if sockets is not None:
        server = EmbeddedServer(config.run_id, clock=clock)
        port = await server.start(sockets)
    store = await EmbeddedStore.connect(
        host, port, config.run_id, timeout=config.wait_for_nodes or None
    )
    addr = config.local_addr or reachable_address(store.local_addr, host)
    return Meeting(store, server, addr, f"{host}:{port}")

