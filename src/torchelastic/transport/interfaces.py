"""The addresses of this machine, and the network interface of each."""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger(__name__)

# Messages to the kernel over netlink, and its answers: see rtnetlink(7).
_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_REQUEST_ALL = 0x301
_END = 3
_HEADER = struct.Struct("=IHHII")
_ADDRESS_MESSAGE = struct.Struct("=BBBBi")
_ATTRIBUTE = struct.Struct("=HH")
_IFA_ADDRESS = 1
#: The local address on a point-to-point link, where IFA_ADDRESS is that of the far end.
_IFA_LOCAL = 2
_ANSWER_SIZE = 1 << 16


@dataclass(frozen=True)
class Placed:
    """An address on an interface."""

    address: str
    interface: str


def placed_addresses() -> list[Placed]:
    """The addresses of this machine, in the kernel's order; none if it cannot be asked."""
    try:
        return [found for answer in _answers() for found in _parse(answer)]
    except OSError as error:
        # Some sandboxes have no netlink. What follows from this list can be set by hand.
        log.debug("Cannot list the addresses of this machine: %s.", error)
        return []


def interface_of(address: str) -> str | None:
    """The interface that has an address; None for a loopback address or one that is not here."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.is_loopback:
        return None
    for placed in placed_addresses():
        if ipaddress.ip_address(placed.address) == wanted:
            return placed.interface
    return None


def can_be_told(address: str) -> bool:
    """Return whether other machines can use an address to reach this one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def _answers() -> Iterator[bytes]:
    """The kernel's answers about each address."""
    body = _ADDRESS_MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    head = _HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, _REQUEST_ALL, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(head + body)
        while True:
            for kind, message in _messages(kernel.recv(_ANSWER_SIZE)):
                if kind == _RTM_NEWADDR:
                    yield message
                elif kind == _END:
                    return
                else:
                    raise OSError(f"the kernel answered with {kind}")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def _parse(message: bytes) -> Iterator[Placed]:
    family, _, _, _, index = _ADDRESS_MESSAGE.unpack_from(message)
    attributes = dict(_attributes(message[_ADDRESS_MESSAGE.size :]))
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if family in (socket.AF_INET, socket.AF_INET6) and packed:
        yield Placed(socket.inet_ntop(family, packed), socket.if_indextoname(index))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
