"""The checks of addresses: the rendezvous (`rendezvous`, `etcd`), and what else the agent opens.

A rendezvous endpoint on this machine is bound, any other one connected to. A running job is not
disturbed: the check says hello as a node does, and disconnects. If the job refuses it, for another
job id or secret, the job also logs that once. At etcd, the check acts as a node of a job with a
random name.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.agent.telemetry.http_endpoints import MetricsServer
from torchelastic.clock import SystemClock
from torchelastic.config import (
    DEFAULT_ETCD_PORT,
    OWN_ETCD,
    PAGE_ANYWHERE,
    LaunchConfig,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
)
from torchelastic.doctor.finding import Finding, fault, not_checked, ok, warning
from torchelastic.errors import ConfigError, RendezvousError, RendezvousRefused
from torchelastic.events.handlers import sink_for
from torchelastic.rendezvous.etcd.connection_pool import (
    Address,
    ConnectionPool,
    RetryLimit,
    client_context,
)
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore, remove_if_finished
from torchelastic.rendezvous.etcd.settings import EtcdSettings
from torchelastic.transport import credentials, http_socket
from torchelastic.transport.addresses import bind_endpoint, is_own_endpoint, loopback_addresses
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once, is_refused_everywhere

#: Seconds for an endpoint to answer.
ANSWER_TIMEOUT = 3.0


def secret(config: LaunchConfig) -> list[Finding]:
    """Check the job's secret and certificates."""
    try:
        shown = credentials.load_quietly(config)
    except ConfigError as error:
        return [fault("secret", str(error))]
    doubts = credentials.doubts(config, shown.secret)
    if doubts:
        return [warning("secret", doubt) for doubt in doubts]
    if not config.rdzv_endpoint:
        return []
    how = "a secret" if shown.secret is not None else "no secret and needs none"
    return [ok("secret", f"The job has {how}{' and TLS' if shown.client_tls else ''}.")]


def rendezvous(config: LaunchConfig) -> list[Finding]:
    """Check every endpoint of the embedded rendezvous; may wait for the name service."""
    if not config.rdzv_endpoint:
        return [ok("rendezvous", "The job has one node; its rendezvous is private.")]
    try:
        shown = credentials.load_quietly(config)
    except ConfigError:
        shown = Credentials()  # `secret` reports the fault
    places = [
        Endpoint(host, port, config.run_id, shown)
        for host, port in parse_endpoints(config.rdzv_endpoint)
    ]
    return [_look(place, config) for place in places]


def hosts(config: LaunchConfig) -> bool:
    """Return True if an endpoint is on this machine; may wait for the name service."""
    if not config.rdzv_endpoint:
        return False
    return any(
        is_own_endpoint(host, is_host=config.is_host)
        for host, _ in parse_endpoints(config.rdzv_endpoint)
    )


def _look(place: Endpoint, config: LaunchConfig) -> Finding:
    try:
        if not is_own_endpoint(place.host, is_host=config.is_host):
            return _call(place, ours=False)
        sockets = bind_endpoint(place.host, place.port, is_host=True)
    except ConfigError as error:
        return fault("rendezvous", str(error))
    if sockets is None:
        return _call(place, ours=True)
    for listener in sockets:
        listener.close()
    return ok("rendezvous", f"{place} is this machine and the port is free: this node will host.")


def _call(place: Endpoint, *, ours: bool) -> Finding:
    began = time.monotonic()
    try:
        asyncio.run(_greet(place))
    except RendezvousRefused as error:
        return fault("rendezvous", str(error))
    except ConfigError as error:
        return fault("rendezvous", str(error))
    except (OSError, asyncio.TimeoutError, NoAnswer) as error:
        return _unanswered(place, error, ours)
    took = 1000 * (time.monotonic() - began)
    return ok("rendezvous", f"Job '{place.job}' at {place} accepted this node after {took:.0f} ms.")


async def _greet(place: Endpoint) -> None:
    link, _ = await connect_once(place, timeout=ANSWER_TIMEOUT)
    link.abort()
    await asyncio.wait({link.ended}, timeout=ANSWER_TIMEOUT)


def _unanswered(place: Endpoint, error: Exception, ours: bool) -> Finding:
    if isinstance(error, socket.gaierror):
        return fault(
            "rendezvous",
            f"The name '{place.host}' does not resolve.",
            "Correct --rdzv-endpoint; if the cluster creates the name later, check again then.",
        )
    if isinstance(error, NoAnswer):
        return fault(
            "rendezvous",
            f"{place} accepts connections but does not answer as a rendezvous.",
            "Choose another port in --rdzv-endpoint, or stop the program that listens there.",
        )
    if ours:
        # Neither bound nor connected to: another kind of socket has the port.
        return fault(
            "rendezvous",
            f"The port of {place} is in use on this machine, but does not accept connections.",
            "Choose another port in --rdzv-endpoint.",
        )
    if isinstance(error, OSError) and is_refused_everywhere(error):
        return not_checked(
            "rendezvous",
            f"{place} is another machine and can be reached, but nothing listens there yet.",
            "Check again when the agent of that node runs.",
        )
    silent = isinstance(error, asyncio.TimeoutError)
    reason = "no answer" if silent else getattr(error, "strerror", None) or str(error)
    return warning(
        "rendezvous",
        f"{place} cannot be reached ({reason}).",
        "Check that the machine is up and that no firewall blocks its ports.",
    )


OLDEST = (3, 4)
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


def etcd(config: LaunchConfig) -> list[Finding]:
    """Ask every server, then act as a node of a job with a random name."""
    if config.rdzv_endpoint == OWN_ETCD:
        return [_own_program()]
    try:
        settings = EtcdSettings.of(config.rdzv_configs)
    except ConfigError as error:
        return [fault("etcd", str(error))]
    return asyncio.run(_ask_all(config, settings))


def _own_program() -> Finding:
    # Imported here: only jobs that start their own etcd need it.
    from torchelastic.rendezvous.etcd.local_server import find_etcd

    try:
        return ok("etcd", f"The job will start its own etcd: {find_etcd()}.")
    except ConfigError as error:
        return fault("etcd", str(error))


async def _ask_all(config: LaunchConfig, settings: EtcdSettings) -> list[Finding]:
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
        return [fault("etcd", text) for text in dict.fromkeys(s.trouble for s in servers)]
    found = [
        warning("etcd", server.trouble, "Find out why it is down; the job uses the other servers.")
        for server in servers
        if server.trouble
    ]
    for server in answering:
        if _number(server.version) < OLDEST:
            found.append(
                fault(
                    "etcd",
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
        return fault("etcd", str(error))
    return lease_found(", ".join(format_endpoint(*place) for place in places), kept, took)


def lease_found(places: str, kept: bool, took: float) -> Finding:
    """Judge the trial lease. Pure."""
    if not kept:
        return fault("etcd", f"etcd at {places} does not keep leases.", "Check its log.")
    if took > SLOW_LEASE:
        return warning(
            "etcd",
            f"etcd at {places} is slow: {took:.1f} s for a few small requests.",
            "Give it a faster disk, or run it closer to the nodes.",
        )
    return ok("etcd", f"etcd at {places} grants and renews leases ({took:.2f} s).")


def _number(version: str) -> tuple[int, ...]:
    """Parse `3.4.23` as (3, 4); an unknown version counts as new enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else OLDEST


def listeners(config: LaunchConfig) -> list[Finding]:
    """Find what the agent would refuse, and addresses at which it cannot listen."""
    found = _refused(lambda: MetricsServer.wanted(config))
    found += _refused(lambda: DashboardProcess.wanted(config))
    found += _refused(lambda: _try_handler(config.event_log_handler))
    return found or [
        *_address("--metrics-address", config.metrics_address),
        *_address("--dashboard", config.dashboard),
    ]


def _refused(make: Callable[[], object]) -> list[Finding]:
    try:
        make()
    except ConfigError as error:
        return [fault("launch", str(error))]
    return []


def _try_handler(name: str) -> None:
    if ":" in name:
        return  # the user's code, which may import anything
    sink = sink_for(name)
    if sink is not None:
        sink.close()


def _address(flag: str, address: str) -> list[Finding]:
    """Warn at most: a job runs without either."""
    if not address or address == PAGE_ANYWHERE:
        return []
    host, port = parse_endpoint(address)
    try:
        asyncio.run(_listen((*loopback_addresses(host), host)[0], port))
    except OSError as error:
        return [
            warning(
                "endpoints",
                f"Cannot listen at {flag} {address} ({error.strerror}): the job would run without "
                "it.",
                "Use another port, or an address of this machine.",
            )
        ]
    return [ok("endpoints", f"{flag} {address} is free.")]


async def _listen(address: str, port: int) -> None:
    (await http_socket.listen(address, port, 1)).close()
