"""Find the agent that hosts the store: the one whose machine the endpoint names, if the port is
free."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from torchelastic.errors import ConfigError

log = logging.getLogger(__name__)

#: The kernel queues this many joiners until they are accepted; the limit is net.core.somaxconn.
LISTEN_BACKLOG = 4096

_LOOPBACK = ("127.0.0.1", "::1")
#: Addresses for documentation: no machine has them.
_NOBODYS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
#: This machine lacks the address or the whole protocol.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Network(Protocol):
    """The network functions of the machine that an agent uses."""

    def resolve(self, host: str) -> list[tuple[int, str]]:
        """The addresses of a name, each with its family; may wait for the name service."""
        ...

    def is_local(self, family: int, address: str) -> bool: ...

    def outward_address(self) -> str | None:
        """The address this machine uses to reach others; any of its addresses if there is no
        route."""
        ...

    def listen(self, family: int, address: str, port: int) -> socket.socket: ...


class _Kernel:
    """The network of the machine that this process runs on."""

    def resolve(self, host: str) -> list[tuple[int, str]]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [(family, str(sockaddr[0])) for family, _, _, _, sockaddr in found]

    def is_local(self, family: int, address: str) -> bool:
        return _is_local(family, address)

    def outward_address(self) -> str | None:
        return _outward_address()

    def listen(self, family: int, address: str, port: int) -> socket.socket:
        return _listen(family, address, port)


_KERNEL = _Kernel()
#: The machine's own network; agents in a simulation have another.
NETWORK: ContextVar[Network] = ContextVar("network", default=_KERNEL)


@lru_cache(maxsize=64)  # called for the endpoint with every connection
def loopback_addresses(host: str) -> tuple[str, ...]:
    """The addresses of a host name that can only mean this machine; else none.

    A machine's own name does not count, even if /etc/hosts maps it to 127.0.1.1: on other machines
    it means an address they can reach.
    """
    if host == "localhost" or host.endswith(".localhost"):
        return _LOOPBACK
    try:
        return (host,) if ipaddress.ip_address(host).is_loopback else ()
    except ValueError:
        return ()


def is_address(host: str) -> bool:
    """Return whether this is an address, not a name.

    >>> is_address("10.0.0.1"), is_address("fe80::1%eth0"), is_address("node1")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_own_endpoint(host: str, *, is_host: bool | None = None) -> bool:
    """Return whether an endpoint's name means this machine, unless `is_host` says so or the
    contrary.

    May wait for the name service.
    """
    if is_host is not None:
        return is_host
    return bool(loopback_addresses(host)) or _is_this_machine(host)


def bind_endpoint(
    host: str, port: int, *, is_host: bool | None = None
) -> list[socket.socket] | None:
    """Listening sockets for the endpoint; None if another agent should host the store.

    That is so if the name means another machine, does not resolve yet, or the port is in use.
    `is_host` replaces the check of the addresses (behind address translation, for example). May
    wait for the name service.
    """
    if not is_own_endpoint(host, is_host=is_host):
        return None
    loopback = loopback_addresses(host)
    try:
        return _listen_at(loopback, port)
    except PermissionError as error:
        raise ConfigError(
            f"This agent may not listen on port {port}: choose one above 1023 in --rdzv-endpoint."
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE or error.errno in _NOT_HERE:
            return None
        raise


def listen_beside(host: str, port: int, known: int = 0) -> list[socket.socket]:
    """Listening sockets for an agent whose endpoint belongs to another: at the port where this node
    is `known`, or at the same port if it is free here, because then the address of any node is as
    good as the endpoint's."""
    loopback = loopback_addresses(host)
    for wanted in filter(None, (known, 0 if loopback else port)):
        try:
            return _listen_at(loopback, wanted)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return _listen_at(loopback, 0)


def _listen_at(loopback: Sequence[str], port: int) -> list[socket.socket]:
    return _listen_on(loopback, port) if loopback else [listen_everywhere(port)]


def reachable_address(address: str, host: str) -> str:
    """The address where peers reach a node whose connection to the store has the local `address`.

    A host that connects to itself by its own name may use the loopback interface; then this is its
    address on the network.
    """
    if loopback_addresses(host) or can_be_told(address):
        return address
    return NETWORK.get().outward_address() or address


def _outward_address() -> str | None:
    routed = (_source_towards(family, address) for family, address in _NOBODYS.items())
    placed = (found.address for found in placed_addresses())
    return next((found for found in (*routed, *placed) if found and can_be_told(found)), None)


def _is_this_machine(host: str) -> bool:
    """Return whether all the addresses of a name are this machine's.

    Any is not enough: the name of a Kubernetes headless service has the addresses of all its pods,
    and each of them would host its own store.
    """
    try:
        found = NETWORK.get().resolve(host)
    except (socket.gaierror, UnicodeError):
        return False
    local = [NETWORK.get().is_local(family, address) for family, address in found]
    if any(local) and not all(local):
        log.warning(
            "'%s' resolves to this machine and others, so this agent does not host the "
            "rendezvous. Use the name of one machine in --rdzv-endpoint.",
            host,
        )
    return all(local)


def _is_local(family: int, address: str) -> bool:
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return True
    if not _can_bind(family, address):
        return False
    # With net.ipv4.ip_nonlocal_bind every address can be bound: then this proves nothing.
    return not _can_bind(family, _NOBODYS[socket.AddressFamily(family)]) or (
        _source_towards(family, address) == address
    )


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _source_towards(family: int, address: str) -> str | None:
    """The address this machine would send from; to itself that is the same one."""
    try:
        # Nothing is sent: connecting a datagram socket only chooses the way out.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _listen_on(addresses: Iterable[str], port: int) -> list[socket.socket]:
    """One socket for each address this machine has, all on one port."""
    sockets: list[socket.socket] = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sockets.append(NETWORK.get().listen(family, address, port))
        except OSError as error:
            # The first address decides: clients try it first.
            if not sockets and error.errno not in _NOT_HERE:
                raise
            continue
        port = sockets[0].getsockname()[1]
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, "no such address here")
    return sockets


def listen_everywhere(port: int) -> socket.socket:
    """A socket for every address of this machine, IPv4 and, if available, IPv6."""
    try:
        return NETWORK.get().listen(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    return NETWORK.get().listen(socket.AF_INET, "0.0.0.0", port)


def _listen(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A host that ended a moment ago leaves connections behind that would hold the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
        sock.bind((address, port))
        # Here, not later: with SO_REUSEADDR two agents can bind a port, only one can listen.
        sock.listen(LISTEN_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


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
