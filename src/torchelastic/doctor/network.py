"""Names, addresses and interfaces: the facts, which `own_name` reads, and the pure verdicts."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.config import LaunchConfig
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.transport.addresses import can_be_told, interface_of, reachable_address

#: Seconds that a name lookup may take: workers look up names on the way into every world.
SLOW_LOOKUP = 1.0
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"


@dataclass(frozen=True)
class Name:
    """This machine's name and addresses."""

    name: str
    #: Addresses that the name resolves to; None: it does not resolve.
    addresses: Sequence[str] | None
    #: Those that other machines can use, too.
    reachable: Sequence[str]
    seconds: float
    #: The address of this machine towards other machines; None: none.
    outward: str | None


def name(known: Name, config: LaunchConfig) -> Finding:
    """Judge the name. The agent announces an address, so the name need not resolve elsewhere."""
    alone = config.max_nodes == 1
    outward = config.local_addr or known.outward
    if outward is None and not alone:
        return fault(
            "name",
            "This machine has no address that other machines can reach.",
            "Connect it to the network of the other nodes, or set --local-addr.",
        )
    if known.seconds > SLOW_LOOKUP:
        return warning(
            "name",
            f"Name lookup is slow: '{known.name}' took {known.seconds:.1f} s, and workers look up "
            "names in every generation.",
            "Add this machine to /etc/hosts, or fix the name servers in /etc/resolv.conf.",
        )
    if alone:
        return ok("name", f"'{known.name}' {_means(known)}; a single node needs no more.")
    if known.reachable:
        return ok("name", f"'{known.name}' is {known.reachable[0]}; other nodes use {outward}.")
    return ok("name", f"'{known.name}' {_means(known)}; other nodes use {outward} instead.")


def _means(known: Name) -> str:
    if known.addresses is None:
        return "does not resolve here"
    return f"resolves to {', '.join(known.addresses)} here"


def interfaces(
    environ: Mapping[str, str], there: Sequence[str], config: LaunchConfig, *, gpus: bool
) -> list[Finding]:
    """Compare the interfaces that the variables name with those that are `there`."""
    found = []
    if environ.get(GLOO):
        found.append(_gloo(environ[GLOO], there, config))
    if environ.get(NCCL):
        found.append(_nccl(environ[NCCL], there, config, gpus))
    return found


def _gloo(value: str, there: Sequence[str], config: LaunchConfig) -> Finding:
    wanted = value.split(",")
    unknown = [name for name in wanted if name not in there]
    if unknown:
        return fault(
            "interfaces",
            f"{GLOO}={value} is not an interface of this machine: gloo will fail to start.",
            f"Unset it, or use one of {', '.join(there)}.",
        )
    return _unless_loopback(GLOO, value, set(wanted) == {LOOPBACK}, config)


def _nccl(value: str, there: Sequence[str], config: LaunchConfig, gpus: bool) -> Finding:
    matching = nccl_matches(value, there)
    if not matching:
        say = fault if gpus else warning
        return say(
            "interfaces",
            f"{NCCL}={value} matches no interface of this machine.",
            f"Unset it, or use one of {', '.join(there)}.",
        )
    return _unless_loopback(NCCL, value, set(matching) == {LOOPBACK}, config)


def _unless_loopback(variable: str, value: str, loopback: bool, config: LaunchConfig) -> Finding:
    if loopback and config.max_nodes > 1:
        return fault(
            "interfaces",
            f"{variable}={value} is the loopback interface: it cannot reach other nodes.",
            "Unset it, or use the interface of the nodes' network.",
        )
    return ok("interfaces", f"{variable}={value} exists.")


def nccl_matches(value: str, there: Sequence[str]) -> list[str]:
    """Return the interfaces that match NCCL's notation: prefixes, `=` exact, `^` all others.

    >>> nccl_matches("^lo,docker", ["lo", "docker0", "eth0"])
    ['eth0']
    """
    but = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = value.lstrip("^=").split(",")

    def fits(name: str) -> bool:
        return name in words if exact else name.startswith(tuple(words))

    return [name for name in there if fits(name) != but]


_HERE = "127.0.0.1"


def own_name() -> Name:
    """Return this machine's name and addresses; may wait for the name service."""
    name = socket.gethostname()
    began = time.monotonic()
    addresses = _addresses(name)
    seconds = time.monotonic() - began
    outward = reachable_address(_HERE, name)
    return Name(
        name=name,
        addresses=addresses,
        reachable=[address for address in addresses or () if can_be_told(address)],
        seconds=seconds,
        outward=None if outward == _HERE else outward,
    )


def interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def interface_for_gloo(address: str | None) -> str | None:
    """Return the value of GLOO_SOCKET_IFNAME that the agent sets on a node with this address."""
    return None if address is None else interface_of(address)


def _addresses(name: str) -> list[str] | None:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
