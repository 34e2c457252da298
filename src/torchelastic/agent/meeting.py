"""Where the nodes meet: the store at the endpoint, hosted here if this node can bind it."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.joining import host_or_join
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
    store, server = await host_or_join(
        host,
        port,
        config.run_id,
        timeout=config.wait_for_nodes or None,
        clock=clock,
        is_host=config.is_host,
    )
    endpoint = format_endpoint(host, server.port if server is not None else port)
    return Meeting(store, server, config.local_addr or store.local_addr, endpoint)
