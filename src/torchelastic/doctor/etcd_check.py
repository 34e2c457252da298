"""The etcd where the nodes are to meet: each server, its version, and a lease for a moment."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass

from torchelastic.clock import SystemClock
from torchelastic.config import (
    DEFAULT_ETCD_PORT,
    OWN_ETCD,
    LaunchConfig,
    format_endpoint,
    parse_endpoints,
)
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.errors import ConfigError, RendezvousError
from torchelastic.rendezvous.etcd.cleanup import clear_remains
from torchelastic.rendezvous.etcd.connection_pool import Address, ConnectionPool, Patience
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.etcd_tls import client_context
from torchelastic.rendezvous.etcd.settings import EtcdSettings

CHECK = "etcd"
OLDEST = (3, 4)
#: Seconds for a server to answer.
PATIENCE = 3.0
#: Seconds that what a node asks of etcd may take without holding it up.
SLOW = 0.5
#: Seconds of the lease that is tried.
_LEASE = 5.0
_STATUS = "/v3/maintenance/status"


@dataclass(frozen=True)
class Server:
    """What one server answered."""

    place: str
    version: str = ""
    #: Why there is no version.
    trouble: str = ""


def check(config: LaunchConfig) -> list[Finding]:
    """Ask every server, then do what a node does, under the name of a job that nobody has."""
    if config.rdzv_endpoint == OWN_ETCD:
        return [_own_program()]
    try:
        settings = EtcdSettings.of(config.rdzv_configs)
    except ConfigError as error:
        return [fault(CHECK, str(error))]
    return asyncio.run(_examine(config, settings))


def _own_program() -> Finding:
    # Imported here: it is for jobs that start an etcd of their own.
    from torchelastic.rendezvous.etcd.local_server import find_etcd

    try:
        return ok(CHECK, f"{find_etcd()} is started for this job.")
    except ConfigError as error:
        return fault(CHECK, str(error))


async def _examine(config: LaunchConfig, settings: EtcdSettings) -> list[Finding]:
    places = parse_endpoints(config.rdzv_endpoint, DEFAULT_ETCD_PORT)
    servers = await asyncio.gather(*(_ask(place, settings) for place in places))
    found = servers_found(servers)
    if not any(server.version for server in servers):
        return found
    return [*found, await _try_lease(places, settings)]


def servers_found(servers: list[Server]) -> list[Finding]:
    """The verdict on what they answered. Pure."""
    answering = [server for server in servers if server.version]
    if not answering:
        # Each says why; the first sentence is enough where all say the same.
        return [fault(CHECK, text) for text in dict.fromkeys(s.trouble for s in servers)]
    found = [
        warning(CHECK, server.trouble, "The others are asked instead; see why this one is away.")
        for server in servers
        if server.trouble
    ]
    for server in answering:
        if _number(server.version) < OLDEST:
            found.append(
                fault(
                    CHECK,
                    f"etcd at {server.place} is {server.version}, and 3.4 is needed.",
                    "Update it.",
                )
            )
    return found


async def _ask(place: tuple[str, int], settings: EtcdSettings) -> Server:
    name = format_endpoint(*place)
    clock = SystemClock()
    try:
        tls = None if settings.tls is None else client_context(settings.tls)
        line = ConnectionPool([Address(*place)], clock=clock, tls=tls, login=settings.login)
        try:
            patience = Patience(line, PATIENCE, clock, first=True)
            answer = await line.call(_STATUS, {}, patience)
        finally:
            line.close()
    except (RendezvousError, ConfigError) as error:
        return Server(name, trouble=str(error))
    return Server(name, version=str(answer.get("version", "of an unknown version")))


async def _try_lease(places: tuple[tuple[str, int], ...], settings: EtcdSettings) -> Finding:
    """Be a node for a moment; nothing is left."""
    job = f"doctor-{secrets.token_hex(4)}"
    began = time.monotonic()
    try:
        store = await EtcdStore.connect(
            places, job, timeout=PATIENCE, settings=settings, reconnect_timeout=PATIENCE
        )
        try:
            await store.open_lease(_LEASE)
            await store.put("member/doctor", {}, leased=True)
            kept = await store.keep_alive()
            took = time.monotonic() - began
            await store.end_lease()
            await clear_remains(store)
        finally:
            await store.close()
    except (RendezvousError, ConfigError) as error:
        return fault(CHECK, str(error))
    return lease_found(", ".join(format_endpoint(*place) for place in places), kept, took)


def lease_found(places: str, kept: bool, took: float) -> Finding:
    """The verdict on the lease. Pure."""
    if not kept:
        return fault(CHECK, f"etcd at {places} does not keep leases.", "See its log.")
    if took > SLOW:
        return warning(
            CHECK,
            f"etcd at {places} took {took:.1f} s for a few small requests.",
            "Give it a faster disk, or run it nearer.",
        )
    return ok(CHECK, f"etcd at {places} grants and keeps leases, in {took:.2f} s.")


def _number(version: str) -> tuple[int, ...]:
    """`3.4.23` as (3, 4, 23); one that is not known counts as new enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else OLDEST
