"""The check of what the agent opens besides the rendezvous: metrics, dashboard, event handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.agent.telemetry.http_endpoints import MetricsServer
from torchelastic.config import PAGE_ANYWHERE, LaunchConfig, parse_endpoint
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.errors import ConfigError
from torchelastic.events.handlers import sink_for
from torchelastic.transport import http_socket
from torchelastic.transport.addresses import loopback_addresses

CHECK = "endpoints"


def check(config: LaunchConfig) -> list[Finding]:
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
                CHECK,
                f"Cannot listen at {flag} {address} ({error.strerror}): the job would run without "
                "it.",
                "Use another port, or an address of this machine.",
            )
        ]
    return [ok(CHECK, f"{flag} {address} is free.")]


async def _listen(address: str, port: int) -> None:
    (await http_socket.listen(address, port, 1)).close()
