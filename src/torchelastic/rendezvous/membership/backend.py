"""The rendezvous back end: the embedded store or etcd."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torchelastic.clock import Clock
from torchelastic.config import ETCD_BACKENDS, LaunchConfig, format_endpoint, parse_endpoints
from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous.backend_parameters import check_backend
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.node import EmbeddedNode
from torchelastic.rendezvous.embedded.voter_file import VoterFile
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore, close_store, open_store
from torchelastic.rendezvous.store import Json, Store
from torchelastic.rendezvous.witness.vote_keys import Witness, WitnessClient
from torchelastic.transport import credentials, frames
from torchelastic.transport.addresses import listen_beside
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Handler, Listener
from torchelastic.transport.ring import OnSuspicion, Ring

#: Nodes, each with a connection or two to the host, for which the usual limits are too low.
MANY_NODES = 200
PRIVATE_ENDPOINT = "127.0.0.1:0"


class RendezvousBackend(Protocol):
    """This node's connection to the store of the job, and its failover."""

    @property
    def store(self) -> Store: ...

    @property
    def addr(self) -> str:
        """The address where other nodes reach this one."""
        ...

    @property
    def peer(self) -> str:
        """The address where other agents reach this one; empty if they cannot."""
        ...

    @property
    def endpoint(self) -> str:
        """The best endpoint for a new node to find the job."""
        ...

    @property
    def term(self) -> int:
        """The term of the store's host; 0 if the host never changes."""
        ...

    @property
    def is_host(self) -> bool: ...

    @property
    def loss(self) -> str:
        """The reason why the store is lost; empty while it is not."""
        ...

    @property
    def may_begin_at(self) -> float:
        """The time when this node, if it leads, may form the first world."""
        ...

    def ring(self, node: str, on_suspicion: OnSuspicion) -> Ring | None:
        """Connections to other agents, if the store would be slow to notice an agent's end."""
        ...

    @property
    def credentials(self) -> Credentials:
        """The credentials for connections to other agents."""
        ...

    def serve(self, purpose: str, handler: Handler) -> None:
        """Pass connections that other agents make for this purpose to a handler."""
        ...

    def takes_up(self, generation: int) -> bool:
        """Return whether this node may act on a world that the store shows."""
        ...

    @property
    def dead(self) -> frozenset[str]:
        """Nodes of the last world that are known to be dead."""
        ...

    @property
    def witness(self) -> Witness | None:
        """Storage that has the deciding vote between halves."""
        ...

    def hold(self, holding: FailoverState) -> None:
        """Remember what is needed to host the store if its host is lost."""
        ...

    async def kept(self) -> None:
        """Return when what this node holds is on disk, and others may hear of it."""
        ...

    def hear_of(self, addresses: Sequence[str]) -> None:
        """Remember agents that may know where the store is if it is lost."""
        ...

    def say_goodbye(self) -> None:
        """Note that this node leaves and has said so."""
        ...

    async def regain(
        self,
        rows: Callable[[], Mapping[str, Json]],
        *,
        timeout: float | None,
        say: Callable[[str], None],
    ) -> bool:
        """After the store was lost, connect to one again, or raise `RendezvousLost`.

        `rows` returns this node's rows there under its lease; returns whether they are there again.
        """
        ...

    async def hand_over(self, rows: Callable[[], Mapping[str, Json]], seconds: float) -> None:
        """As a host that leaves: let another node take over, within some seconds."""
        ...

    async def close(self, others: float, *, ended: bool = False) -> None:
        """Close; a host waits up to `others` seconds for the other nodes to go first. `ended`: what
        is kept of the job elsewhere is no longer needed."""
        ...


class EtcdBackend:
    """etcd as the store, with a listener for the ring."""

    term = 0
    is_host = False
    may_begin_at = 0.0
    dead: frozenset[str] = frozenset()
    witness = None
    loss = ""

    def __init__(self, config: LaunchConfig, store: EtcdStore) -> None:
        self.store = store
        self.addr = config.local_addr or store.local_addr
        self.endpoint = config.rdzv_endpoint
        self._silence = config.lease
        shown = credentials.load(config)
        #: Of no place in particular.
        self._job = Endpoint("", 0, config.run_id, shown)
        self._listener = Listener(config.run_id, secret=shown.secret, tls=shown.server_tls)
        self._ring: Ring | None = None

    async def listen(self) -> None:
        host, _ = parse_endpoints(self.endpoint)[0]
        await self._listener.listen(await asyncio.to_thread(listen_beside, host, 0))

    @property
    def peer(self) -> str:
        return format_endpoint(self.addr, self._listener.port)

    def ring(self, node: str, on_suspicion: OnSuspicion) -> Ring:
        self._ring = Ring(node, self._job, silence=self._silence, on_suspicion=on_suspicion)
        self._listener.serve(frames.RING, self._ring.admit)
        return self._ring

    @property
    def credentials(self) -> Credentials:
        return self._job.credentials

    def serve(self, purpose: str, handler: Handler) -> None:
        self._listener.serve(purpose, handler)

    def takes_up(self, generation: int) -> bool:
        return True

    def hold(self, holding: FailoverState) -> None:
        """Nothing: etcd does not need us."""

    async def kept(self) -> None:
        """Nothing: etcd does not forget."""

    def hear_of(self, addresses: Sequence[str]) -> None:
        """Nothing: etcd is where it is."""

    def say_goodbye(self) -> None:
        """Do nothing: the member record says it."""

    async def regain(
        self,
        rows: Callable[[], Mapping[str, Json]],
        *,
        timeout: float | None,
        say: Callable[[str], None],
    ) -> bool:
        raise RendezvousLost(f"Lost etcd at {self.endpoint}.")

    async def hand_over(self, rows: Callable[[], Mapping[str, Json]], seconds: float) -> None:
        """Nothing: etcd stays."""

    async def close(self, others: float, *, ended: bool = False) -> None:
        if self._ring is not None:
            await self._ring.close()
        await close_store(self.store)
        await self._listener.close()


async def meet(
    config: LaunchConfig,
    node: str,
    clock: Clock,
    say: Callable[[str], None],
    on_child: Callable[[int], None] = lambda pid: None,
    file: VoterFile | None = None,
) -> RendezvousBackend:
    """Open the store of the job: host it, or wait for it and say what is in the way.

    `on_child` is called with every process that this starts. `file` is where the node keeps its
    vote; without one, its next agent has none.
    """
    check_backend(config.rdzv_backend, config.rdzv_configs)
    if config.max_nodes > MANY_NODES:
        # The default limit of open files is below the nodes of a large job.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if config.rdzv_backend in ETCD_BACKENDS:
        return await _meet_at_etcd(config, clock)
    embedded_node = _embedded_node(config, node, clock, on_child, file)
    try:
        await embedded_node.open(config.wait_for_nodes or None, say)
    except BaseException:
        await embedded_node.close()
        raise
    return embedded_node


async def _meet_at_etcd(config: LaunchConfig, clock: Clock) -> EtcdBackend:
    store = await open_store(
        config.rdzv_endpoint,
        config.run_id,
        config.rdzv_configs,
        timeout=config.wait_for_nodes or None,
        clock=clock,
    )
    backend = EtcdBackend(config, store)
    try:
        await backend.listen()
    except BaseException:
        await backend.close(0.0)
        raise
    return backend


def _embedded_node(
    config: LaunchConfig,
    node: str,
    clock: Clock,
    on_child: Callable[[int], None],
    file: VoterFile | None,
) -> EmbeddedNode:
    witness = None
    if config.witness and config.max_nodes > 1:
        asking = WitnessClient(config.witness, on_child)
        witness = Witness(asking, config.witness, config.run_id, node)
    shown = credentials.load(config)
    ended = file.ended if file is not None else ()
    places = [
        Endpoint(host, port, config.run_id, shown, ended)
        for host, port in parse_endpoints(config.rdzv_endpoint or PRIVATE_ENDPOINT)
    ]
    return EmbeddedNode(
        places,
        node,
        clock=clock,
        lease=config.lease,
        local_addr=config.local_addr,
        is_host=config.is_host,
        own=config.own_endpoint,
        two_node_takeover=config.two_node_takeover,
        may_be_remembered=config.max_nodes > 1,
        joins_closed=config.scheduled,
        passes_workers_on=config.rdzv_backend == "static",
        witness=witness,
        file=file,
    )
