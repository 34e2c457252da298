"""Where the nodes meet: at the store of the embedded rendezvous, or at etcd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torchelastic.clock import Clock
from torchelastic.config import ETCD_BACKENDS, LaunchConfig, parse_endpoints
from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous import credentials
from torchelastic.rendezvous.embedded.dial import Endpoint
from torchelastic.rendezvous.embedded.seat import Holding, Seat
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.opening import close_store, open_store
from torchelastic.rendezvous.parameters import check_backend
from torchelastic.rendezvous.store import Json, Store

PRIVATE_ENDPOINT = "127.0.0.1:0"


class Meeting(Protocol):
    """This node's connection to the store of the job, and what becomes of it."""

    @property
    def store(self) -> Store: ...

    @property
    def addr(self) -> str:
        """Where other nodes reach this one."""
        ...

    @property
    def peer(self) -> str:
        """Where their agents reach its agent; empty: nowhere."""
        ...

    @property
    def endpoint(self) -> str:
        """Where a newcomer would best look for the job."""
        ...

    @property
    def term(self) -> int:
        """How often the host of the store has changed; 0: it does not."""
        ...

    @property
    def is_host(self) -> bool: ...

    @property
    def loss(self) -> str:
        """Why the store is lost; empty while it is not."""
        ...

    @property
    def may_begin_at(self) -> float:
        """When this node, if it leads, may form the first world."""
        ...

    def takes_up(self, generation: int) -> bool:
        """Whether this node may act on a world that the store shows."""
        ...

    def hold(self, holding: Holding) -> None:
        """Take note of what is needed to host the store, should its host be lost."""
        ...

    def say_goodbye(self) -> None:
        """This node leaves, and has said so."""
        ...

    async def regain(
        self, rows: Mapping[str, Json], *, timeout: float | None, say: Callable[[str], None]
    ) -> bool:
        """Once the store is lost: have one again, or raise `RendezvousLost`.

        `rows` are what this node had there under its lease; says whether they are again.
        """
        ...

    async def close(self, others: float) -> None:
        """Go; a host gives the other nodes up to `others` seconds to go first."""
        ...


@dataclass(frozen=True)
class EtcdMeeting:
    """At an etcd server."""

    store: EtcdStore
    addr: str
    endpoint: str
    peer: str = ""
    term: int = 0
    is_host: bool = False
    may_begin_at: float = 0.0
    loss: str = ""

    def takes_up(self, generation: int) -> bool:
        return True

    def hold(self, holding: Holding) -> None:
        """Nothing: etcd does not need us."""

    def say_goodbye(self) -> None:
        """Nothing more than the member record says."""

    async def regain(
        self, rows: Mapping[str, Json], *, timeout: float | None, say: Callable[[str], None]
    ) -> bool:
        raise RendezvousLost(f"etcd at {self.endpoint} is lost.")

    async def close(self, others: float) -> None:
        await close_store(self.store)


async def meet(config: LaunchConfig, node: str, clock: Clock) -> Meeting:
    """Open the store of the job: host it, or wait for it to be there."""
    check_backend(config.rdzv_backend, config.rdzv_configs)
    timeout = config.wait_for_nodes or None
    if config.rdzv_backend in ETCD_BACKENDS:
        store = await open_store(
            config.rdzv_endpoint, config.run_id, config.rdzv_configs, timeout=timeout, clock=clock
        )
        return EtcdMeeting(store, config.local_addr or store.local_addr, config.rdzv_endpoint)
    seat = _seat(config, node, clock)
    try:
        await seat.open(timeout)
    except BaseException:
        await seat.close()
        raise
    return seat


def _seat(config: LaunchConfig, node: str, clock: Clock) -> Seat:
    shown = credentials.load(config)
    places = [
        Endpoint(host, port, config.run_id, shown)
        for host, port in parse_endpoints(config.rdzv_endpoint or PRIVATE_ENDPOINT)
    ]
    return Seat(
        places,
        node,
        clock=clock,
        lease=config.lease,
        local_addr=config.local_addr,
        is_host=config.is_host,
        two_node_takeover=config.two_node_takeover,
        may_be_remembered=config.max_nodes > 1,
    )
