"""The check of etcd: each server, its version, and a short lease."""

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
from torchelastic.rendezvous.etcd.connection_pool import (
    Address,
    ConnectionPool,
    RetryLimit,
    client_context,
)
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore, remove_if_finished
from torchelastic.rendezvous.etcd.settings import EtcdSettings

CHECK = "etcd"
OLDEST = (3, 4)
#: Seconds for a server to answer.
ANSWER_TIMEOUT = 3.0
#: A warning if a node's first requests take longer than this many seconds.
SLOW_LEASE = 0.5
#: Seconds of the trial lease.
_LEASE = 5.0
_STATUS = "/v3/maintenance/status"


@dataclass(frozen=True)
class ServerAnswer:
    """The answer of one server."""

    place: str
    version: str = ""
    #: Why there is no version.
    trouble: str = ""


def check(config: LaunchConfig) -> list[Finding]:
    """Ask every server, then act as a node of a job with a random name."""
    if config.rdzv_endpoint == OWN_ETCD:
        return [_own_program()]
    try:
        settings = EtcdSettings.of(config.rdzv_configs)
    except ConfigError as error:
        return [fault(CHECK, str(error))]
    return asyncio.run(_examine(config, settings))


def _own_program() -> Finding:
    # Imported here: only jobs that start their own etcd need it.
    from torchelastic.rendezvous.etcd.local_server import find_etcd

    try:
        return ok(CHECK, f"The job will start its own etcd: {find_etcd()}.")
    except ConfigError as error:
        return fault(CHECK, str(error))


async def _examine(config: LaunchConfig, settings: EtcdSettings) -> list[Finding]:
    places = parse_endpoints(config.rdzv_endpoint, DEFAULT_ETCD_PORT)
    servers = await asyncio.gather(*(_ask(place, settings) for place in places))
    found = servers_found(servers)
    if not any(server.version for server in servers):
        return found
    return [*found, await _try_lease(places, settings)]


def servers_found(servers: list[ServerAnswer]) -> list[Finding]:
    """Judge the answers of the servers. Pure."""
    answering = [server for server in servers if server.version]
    if not answering:
        # One finding is enough for servers with the same error.
        return [fault(CHECK, text) for text in dict.fromkeys(s.trouble for s in servers)]
    found = [
        warning(CHECK, server.trouble, "Find out why it is down; the job uses the other servers.")
        for server in servers
        if server.trouble
    ]
    for server in answering:
        if _number(server.version) < OLDEST:
            found.append(
                fault(
                    CHECK,
                    f"etcd at {server.place} has version {server.version}; 3.4 is required.",
                    "Upgrade etcd.",
                )
            )
    return found


async def _ask(place: tuple[str, int], settings: EtcdSettings) -> ServerAnswer:
    name = format_endpoint(*place)
    clock = SystemClock()
    try:
        tls = None if settings.tls is None else client_context(settings.tls)
        line = ConnectionPool([Address(*place)], clock=clock, tls=tls, login=settings.login)
        try:
            patience = RetryLimit(line, ANSWER_TIMEOUT, clock, first=True)
            answer = await line.call(_STATUS, {}, patience)
        finally:
            line.close()
    except (RendezvousError, ConfigError) as error:
        return ServerAnswer(name, trouble=str(error))
    return ServerAnswer(name, version=str(answer.get("version", "of an unknown version")))


async def _try_lease(places: tuple[tuple[str, int], ...], settings: EtcdSettings) -> Finding:
    """Act as a node for a moment, and clean up."""
    job = f"doctor-{secrets.token_hex(4)}"
    began = time.monotonic()
    try:
        store = await EtcdStore.connect(
            places, job, timeout=ANSWER_TIMEOUT, settings=settings, reconnect_timeout=ANSWER_TIMEOUT
        )
        try:
            await store.open_lease(_LEASE)
            await store.put("member/doctor", {}, leased=True)
            kept = await store.keep_alive()
            took = time.monotonic() - began
            await store.end_lease()
            await remove_if_finished(store)
        finally:
            await store.close()
    except (RendezvousError, ConfigError) as error:
        return fault(CHECK, str(error))
    return lease_found(", ".join(format_endpoint(*place) for place in places), kept, took)


def lease_found(places: str, kept: bool, took: float) -> Finding:
    """Judge the trial lease. Pure."""
    if not kept:
        return fault(CHECK, f"etcd at {places} does not keep leases.", "Check its log.")
    if took > SLOW_LEASE:
        return warning(
            CHECK,
            f"etcd at {places} is slow: {took:.1f} s for a few small requests.",
            "Give it a faster disk, or run it closer to the nodes.",
        )
    return ok(CHECK, f"etcd at {places} grants and renews leases ({took:.2f} s).")


def _number(version: str) -> tuple[int, ...]:
    """Parse `3.4.23` as (3, 4); an unknown version counts as new enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else OLDEST
