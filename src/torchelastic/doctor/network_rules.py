"""Verdicts on names, addresses and interfaces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.config import LaunchConfig
from torchelastic.doctor.finding import Finding, fault, ok, warning

#: Seconds that a name may take to be found: workers ask for names on the way into every world.
SLOW = 1.0
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"


@dataclass(frozen=True)
class Name:
    """This machine's name, and what it means here."""

    name: str
    #: None: nothing.
    addresses: Sequence[str] | None
    #: Those of them that mean this machine to others as well.
    told: Sequence[str]
    seconds: float
    #: What this machine has towards other machines; None: nothing.
    outward: str | None


def name(known: Name, config: LaunchConfig) -> Finding:
    """The agent tells the others an address, not the name; so the name itself need not be good."""
    alone = config.max_nodes == 1
    outward = config.local_addr or known.outward
    if outward is None and not alone:
        return fault(
            "name",
            "This machine has no address that other machines could reach.",
            "Connect it to the network of the other nodes, or say --local-addr.",
        )
    if known.seconds > SLOW:
        return warning(
            "name",
            f"Asking what '{known.name}' means took {known.seconds:.1f} s, and workers ask for "
            "names in every generation.",
            "Put this machine into /etc/hosts, or correct the name servers in /etc/resolv.conf.",
        )
    if alone:
        return ok("name", f"'{known.name}' {_means(known)}; one node needs no more.")
    if known.told:
        return ok("name", f"'{known.name}' is {known.told[0]}; the others reach it at {outward}.")
    return ok("name", f"'{known.name}' {_means(known)}; the others are told {outward} instead.")


def _means(known: Name) -> str:
    if known.addresses is None:
        return "means nothing here"
    return f"is {', '.join(known.addresses)} here"


def interfaces(
    environ: Mapping[str, str], there: Sequence[str], config: LaunchConfig, *, gpus: bool
) -> list[Finding]:
    """What the variables name, against the interfaces that are `there`."""
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
            f"{GLOO}={value} names no interface of this machine, and gloo refuses to start.",
            f"Unset it, or take one of {', '.join(there)}.",
        )
    return _unless_loopback(GLOO, value, set(wanted) == {LOOPBACK}, config)


def _nccl(value: str, there: Sequence[str], config: LaunchConfig, gpus: bool) -> Finding:
    matching = nccl_matches(value, there)
    if not matching:
        say = fault if gpus else warning
        return say(
            "interfaces",
            f"{NCCL}={value} fits no interface of this machine.",
            f"Unset it, or name one of {', '.join(there)}.",
        )
    return _unless_loopback(NCCL, value, set(matching) == {LOOPBACK}, config)


def _unless_loopback(variable: str, value: str, loopback: bool, config: LaunchConfig) -> Finding:
    if loopback and config.max_nodes > 1:
        return fault(
            "interfaces",
            f"{variable}={value} is the loopback interface: no other node can be reached by it.",
            "Unset it, or name the interface of the nodes' network.",
        )
    return ok("interfaces", f"{variable}={value} is there.")


def nccl_matches(value: str, there: Sequence[str]) -> list[str]:
    """The interfaces that NCCL's notation leaves: beginnings, exact with `=`, all others with `^`.

    >>> nccl_matches("^lo,docker", ["lo", "docker0", "eth0"])
    ['eth0']
    """
    but = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = value.lstrip("^=").split(",")

    def fits(name: str) -> bool:
        return name in words if exact else name.startswith(tuple(words))

    return [name for name in there if fits(name) != but]
