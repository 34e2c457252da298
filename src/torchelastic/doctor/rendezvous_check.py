"""The check of the rendezvous endpoint: bind it if it is on this machine, or else connect to it.

A running job is not disturbed: the check says hello as a node does, and disconnects. If the job
refuses it, for another job id or secret, the job also logs that once.
"""

from __future__ import annotations

import asyncio
import socket
import time

from torchelastic.config import LaunchConfig, parse_endpoints
from torchelastic.doctor.finding import Finding, fault, not_checked, ok, warning
from torchelastic.errors import ConfigError, RendezvousRefused
from torchelastic.transport import credentials
from torchelastic.transport.addresses import bind_endpoint, is_own_endpoint
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once, is_refused_everywhere

CHECK = "rendezvous"
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


def check(config: LaunchConfig) -> list[Finding]:
    """Check every endpoint of the embedded rendezvous; may wait for the name service."""
    if not config.rdzv_endpoint:
        return [ok(CHECK, "The job has one node; its rendezvous is private.")]
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
        return fault(CHECK, str(error))
    if sockets is None:
        return _call(place, ours=True)
    for listener in sockets:
        listener.close()
    return ok(CHECK, f"{place} is this machine and the port is free: this node will host.")


def _call(place: Endpoint, *, ours: bool) -> Finding:
    began = time.monotonic()
    try:
        asyncio.run(_greet(place))
    except RendezvousRefused as error:
        return fault(CHECK, str(error))
    except ConfigError as error:
        return fault(CHECK, str(error))
    except (OSError, asyncio.TimeoutError, NoAnswer) as error:
        return _unanswered(place, error, ours)
    took = 1000 * (time.monotonic() - began)
    return ok(CHECK, f"Job '{place.job}' at {place} accepted this node after {took:.0f} ms.")


async def _greet(place: Endpoint) -> None:
    link, _ = await connect_once(place, timeout=ANSWER_TIMEOUT)
    link.abort()
    await asyncio.wait({link.ended}, timeout=ANSWER_TIMEOUT)


def _unanswered(place: Endpoint, error: Exception, ours: bool) -> Finding:
    if isinstance(error, socket.gaierror):
        return fault(
            CHECK,
            f"The name '{place.host}' does not resolve.",
            "Correct --rdzv-endpoint; if the cluster creates the name later, check again then.",
        )
    if isinstance(error, NoAnswer):
        return fault(
            CHECK,
            f"{place} accepts connections but does not answer as a rendezvous.",
            "Choose another port in --rdzv-endpoint, or stop the program that listens there.",
        )
    if ours:
        # Neither bound nor connected to: another kind of socket has the port.
        return fault(
            CHECK,
            f"The port of {place} is in use on this machine, but does not accept connections.",
            "Choose another port in --rdzv-endpoint.",
        )
    if isinstance(error, OSError) and is_refused_everywhere(error):
        return not_checked(
            CHECK,
            f"{place} is another machine and can be reached, but nothing listens there yet.",
            "Check again when the agent of that node runs.",
        )
    silent = isinstance(error, asyncio.TimeoutError)
    reason = "no answer" if silent else getattr(error, "strerror", None) or str(error)
    return warning(
        CHECK,
        f"{place} cannot be reached ({reason}).",
        "Check that the machine is up and that no firewall blocks its ports.",
    )
