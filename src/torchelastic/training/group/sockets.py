"""A process group's connected sockets: found by their addresses, identified by their inodes.

gloo does not expose its descriptors, and a list of those that appeared while the group was built
also includes what other threads opened meanwhile. But every rank of a group listens on a port used
only by that group, and publishes it in the store. So a socket belongs to the group if, and only if,
it was accepted at our rank's port or is connected to another rank's.

A descriptor may be closed, and its number reused, between any two system calls. Therefore we shut
down a duplicate whose inode proves that it is the right socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
#: A C `sockaddr` of the family AF_UNSPEC: connecting to it dissolves a connection.
_NOBODY = bytes(16)

#: How often to probe a host, and the seconds it has to answer.
ATTEMPTS, ANSWERS = 2, 1.5
#: Retransmits and window probes in a row without an answer before a peer counts as silent.
AGAIN, ASKED = 3, 2

#: Fields of a C `tcp_info`: retransmits and window probes, both since the last answer; the current
#: timeout in microseconds; milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=2xBB4xI44xI")

#: IP address and port.
Address = tuple[str, int]


@dataclass(frozen=True)
class Ports:
    """The addresses where the ranks of one group listen."""

    own: frozenset[Address]
    #: With the rank of each.
    others: Mapping[Address, int]

    @classmethod
    def told(cls, rank: int, cards: Iterable[Iterable[bytes]]) -> Ports:
        """Build from the store's contents: for each device, the cards in order of ranks."""
        own: set[Address] = set()
        others: dict[Address, int] = {}
        for device in cards:
            for peer, card in enumerate(device):
                if peer == rank:
                    own.add(listening_address(card))
                else:
                    others[listening_address(card)] = peer
        return cls(frozenset(own), others)

    def ranks_at(self, address: Address) -> list[int]:
        """Return the ranks that the other end of a connection may be. If it was accepted at our
        port, only the host is known."""
        if address in self.others:
            return [self.others[address]]
        return sorted({rank for (host, _), rank in self.others.items() if host == address[0]})


def listening_address(card: bytes) -> Address:
    """Return the listening address in the card that gloo publishes for the other ranks.

    A card is: length (8 bytes) and host name, length and address, more. The address is a C
    `sockaddr_storage`. Raises ValueError for an unreadable card.
    """
    try:
        (skip,) = struct.unpack_from("=Q", card)
        family, port = struct.unpack_from("=H", card, 16 + skip) + struct.unpack_from(
            ">H", card, 18 + skip
        )
        start, size = {socket.AF_INET: (20, 4), socket.AF_INET6: (24, 16)}[family]
        packed = card[start + skip : start + skip + size]
        return socket.inet_ntop(family, packed), port
    except (struct.error, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"not a gloo address: {card[:40]!r}") from error


def is_silent(address: Address) -> bool:
    """Return whether a host does not answer at all. A refused connection is an answer."""
    for _ in range(ATTEMPTS):
        try:
            socket.create_connection(address, timeout=ANSWERS).close()
        except ConnectionError:
            return False
        except OSError:  # no answer in time, or no way there
            continue
        return False
    return True


def unanswered(inodes: frozenset[int], seconds: float) -> Address | None:
    """Return the other end of a connection on which nothing was acknowledged for some seconds:
    the network is cut, whatever the processes at both ends do."""
    for connection in _connections(inodes):
        with contextlib.suppress(OSError):  # it may be closed meanwhile
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            if is_unanswered(told, seconds):
                return _address(connection.getpeername())
    return None


def is_unanswered(told: bytes, seconds: float) -> bool:
    """Return whether the kernel has retransmitted for this long without an answer.

    `told` is a C `tcp_info`. The interval between two packets doubles, so the current one shows
    when the retransmits began. A peer that does not read, because it is frozen or late, still
    acknowledges; when its window is full, it answers the kernel's window probes.
    """
    again, asked, wait, heard = _TCP_INFO.unpack(told)
    if heard < seconds * 1000:
        return False
    if again >= AGAIN:
        return bool(wait * (1 - 0.5**again) >= seconds * 1e6)
    return bool(asked >= ASKED)


def find(ports: Ports) -> frozenset[int]:
    """Return the inodes of the group's connections. Call when all are up; later some may fail."""
    return frozenset(inode for fd, inode in _sockets() if _is_of_group(fd, ports))


def shut_down(inodes: frozenset[int]) -> None:
    """Shut these connections down, so that gloo and the other ranks notice."""
    for connection in _connections(inodes):
        with contextlib.suppress(OSError):  # the peer may have closed it already
            connection.shutdown(socket.SHUT_RDWR)


def silence(inodes: frozenset[int]) -> list[socket.socket]:
    """Reconnect those still open to a silent peer, until the returned socket is closed.

    gloo may not notice that a connection was shut down. It does not read while it has no buffer
    for the next data, and a failed operation has taken the buffer away; and it retries a write
    that fails with EPIPE. In both cases the kernel keeps reporting the connection, and gloo's
    thread uses a full core until the group's timeout. Any other write error ends the process. On
    a silent connection the thread sleeps.
    """
    return [_silence(connection) for connection in _connections(inodes)]


def are_open(inodes: frozenset[int]) -> bool:
    """Return whether this process still has one of these sockets open."""
    return any(inode in inodes for _, inode in _sockets())


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of this process's open sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino


def _connections(inodes: frozenset[int]) -> Iterator[socket.socket]:
    """Yield our own descriptors for these sockets, one at a time."""
    for fd, inode in _sockets():
        connection = _duplicate(fd, inode) if inode in inodes else None
        if connection is not None:
            with connection:
                yield connection


def _is_of_group(fd: int, ports: Ports) -> bool:
    """Return whether the descriptor is currently a connected socket of the group."""
    try:
        looking = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        return _matches(looking, ports)
    finally:
        looking.detach()  # it is not ours to close


def _matches(connection: socket.socket, ports: Ports) -> bool:
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        # gloo ends the process when its listener fails.
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        peer = _address(connection.getpeername())
        return peer in ports.others or _address(connection.getsockname()) in ports.own
    except OSError:  # not connected, or closed meanwhile
        return False


def _address(name: tuple[Any, ...]) -> Address:
    """Return the address without the zone of a link-local address, which gloo's card lacks."""
    return name[0].partition("%")[0], name[1]


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """Return our own descriptor for the socket with this inode, or None if it is gone."""
    try:
        own = os.dup(fd)
    except OSError:
        return None
    status = os.fstat(own)
    if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
        return socket.socket(fileno=own)
    os.close(own)
    return None


def _silence(connection: socket.socket) -> socket.socket:
    _dissolve(connection)
    listener = socket.socket(connection.family)
    listener.bind((connection.getsockname()[0], 0))
    listener.listen(1)
    connection.connect_ex(listener.getsockname())  # it need not be accepted
    return listener


def _dissolve(connection: socket.socket) -> None:
    """Dissolve its connection (AF_UNSPEC), which Python's own `connect` cannot do."""
    if _libc.connect(connection.fileno(), _NOBODY, len(_NOBODY)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
