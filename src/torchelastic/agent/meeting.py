"""Where the nodes meet: the store at the endpoint, hosted here if this node can bind it."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.rendezvous.embedded.server import EmbeddedServer
from torchelastic.rendezvous.opening import close_store, open_store
from torchelastic.rendezvous.store import Store

PRIVATE_ENDPOINT = "127.0.0.1:0"


@dataclass(frozen=True)
class Meeting:
    """This node's connection to the store, and the store itself where it is hosted here."""

    store: Store
    server: EmbeddedServer | None
    #: Where other nodes reach this one.
    addr: str
    endpoint: str

    async def close(self, others: float) -> None:
        """Go; a host gives the other nodes up to `others` seconds to go first."""
        await close_store(self.store, self.server, others=others)


async def meet(config: LaunchConfig, clock: Clock) -> Meeting:
    """Open the store of the job: host it, or wait for it to be there."""
    endpoint = config.rdzv_endpoint or PRIVATE_ENDPOINT
    store, server = await open_store(
        config.rdzv_backend,
        endpoint,
        config.run_id,
        config.rdzv_configs,
        timeout=config.wait_for_nodes or None,
        clock=clock,
        is_host=config.is_host,
    )
    if server is not None:
        endpoint = format_endpoint(parse_endpoint(endpoint)[0], server.port)
    return Meeting(store, server, config.local_addr or store.local_addr, endpoint)
