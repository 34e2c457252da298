"""Read the names, addresses and interfaces that `network_rules` judges."""

from __future__ import annotations

import socket
import time

from torchelastic.doctor.network_rules import Name
from torchelastic.transport.addresses import can_be_told, interface_of, reachable_address

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
