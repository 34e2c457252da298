"""The place where the nodes are to meet: bound, where it is this machine's, or called.

Nothing that runs there is disturbed: we say hello as a node does, and go. What a job there says of
us, that another job was meant or another secret, it says in its log as well, once.
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
#: Seconds for a place to answer.
PATIENCE = 3.0


def secret(config: LaunchConfig) -> list[Finding]:
    """What is unwise about the job's secret and certificates, or wrong with them."""
    try:
        shown = credentials.load_quietly(config)
    except ConfigError as error:
        return [fault("secret", str(error))]
    doubts = credentials.doubts(config, shown.secret)
    if doubts:
        return [warning("secret", doubt) for doubt in doubts]
    if not config.rdzv_endpoint:
        return []
    how = "a secret" if shown.secret is not None else "no secret, and needs none"
    return [ok("secret", f"The job has {how}{' and TLS' if shown.client_tls else ''}.")]


def check(config: LaunchConfig) -> list[Finding]:
    """Every endpoint of the embedded rendezvous; may wait for the name service."""
    if not config.rdzv_endpoint:
        return [ok(CHECK, "One node meets nobody: the rendezvous is private.")]
    try:
        shown = credentials.load_quietly(config)
    except ConfigError:
        shown = Credentials()  # the fault is told by `secret`
    places = [
        Endpoint(host, port, config.run_id, shown)
        for host, port in parse_endpoints(config.rdzv_endpoint)
    ]
    return [_look(place, config) for place in places]


def hosts(config: LaunchConfig) -> bool:
    """Whether one of the endpoints is this machine's; may wait for the name service."""
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
    return ok(CHECK, f"{place} is this machine, and the port is free: this node hosts.")


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
    return ok(CHECK, f"Job '{place.job}' answers at {place} after {took:.0f} ms and lets us in.")


async def _greet(place: Endpoint) -> None:
    link, _ = await connect_once(place, timeout=PATIENCE)
    link.abort()
    await asyncio.wait({link.ended}, timeout=PATIENCE)


def _unanswered(place: Endpoint, error: Exception, ours: bool) -> Finding:
    if isinstance(error, socket.gaierror):
        return fault(
            CHECK,
            f"Nobody here knows the name '{place.host}'.",
            "Correct --rdzv-endpoint; if the name comes with the cluster, look again then.",
        )
    if isinstance(error, NoAnswer):
        return fault(
            CHECK,
            f"Something at {place} takes connections and does not answer as a rendezvous.",
            "Choose another port in --rdzv-endpoint, or end what listens there.",
        )
    if ours:
        # It can be connected to, or bound: where it is neither, something odd has the port.
        return fault(
            CHECK,
            f"The port of {place} is in use on this machine by what cannot be called.",
            "Choose another port in --rdzv-endpoint.",
        )
    if isinstance(error, OSError) and is_refused_everywhere(error):
        return not_checked(
            CHECK,
            f"{place} is another machine, which can be reached; nobody listens there yet.",
            "Look again when the agent of that node runs.",
        )
    silent = isinstance(error, asyncio.TimeoutError)
    reason = "no answer" if silent else getattr(error, "strerror", None) or str(error)
    return warning(
        CHECK,
        f"{place} cannot be reached ({reason}).",
        "See whether the machine is up, and whether a firewall lets all ports through.",
    )
