"""A process group's connected sockets: found by their addresses, shut down by their inodes.

gloo keeps its descriptors to itself, and a list of those that appeared while the group was built
also has what other threads opened meanwhile. But every rank of a group listens on a port of the
group's own, and says which in the store. So a socket is the group's if, and only if, it was
accepted at our rank's port or is connected to another rank's.

A descriptor may be closed, and its number used again, between any two system calls. Therefore what
is looked at and shut down is a duplicate, whose inode says that it is the socket it was taken for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: IP address and port.
Address = tuple[str, int]


@dataclass(frozen=True)
class Ports:
    """Where the ranks of one group listen."""

    own: frozenset[Address]
    others: frozenset[Address]

    @classmethod
    def told(cls, rank: int, cards: Iterable[Iterable[bytes]]) -> Ports:
        """From what the ranks put into the store: for each device the cards in order of ranks."""
        own: set[Address] = set()
        others: set[Address] = set()
        for device in cards:
            for peer, card in enumerate(device):
                (own if peer == rank else others).add(listener(card))
        return cls(frozenset(own), frozenset(others))


def listener(card: bytes) -> Address:
    """The listening address in what gloo tells the other ranks.

    A card is: length (8 bytes) and host name, length and address, more. The address is a C
    `sockaddr_storage`. What cannot be read raises ValueError.
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
        raise ValueError(f"not an address as gloo writes it: {card[:40]!r}") from error


def shut_down(ports: Ports) -> int:
    """Shut the group's connected sockets down; how many there were."""
    found = 0
    for fd, inode in _sockets():
        connection = _duplicate(fd, inode) if _is_of_group(fd, ports) else None
        if connection is None:
            continue
        with connection:
            if _matches(connection, ports):
                _shut(connection)
                found += 1
    return found


def count(ports: Ports) -> int:
    """How many of the group's connected sockets are open."""
    return sum(_is_of_group(fd, ports) for fd, _ in _sockets())


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of this process's open sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino


def _is_of_group(fd: int, ports: Ports) -> bool:
    """Whether the descriptor is, at this moment, a connected socket of the group."""
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
        # shutdown() on gloo's listener ends the process.
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        peer = _address(connection.getpeername())
        return peer in ports.others or _address(connection.getsockname()) in ports.own
    except OSError:  # not connected, or closed meanwhile
        return False


def _address(name: tuple[Any, ...]) -> Address:
    """Without the zone of a link-local address, which gloo's card does not name."""
    return name[0].partition("%")[0], name[1]


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """A descriptor of our own for the socket with this inode; None if it is gone."""
    try:
        own = os.dup(fd)
    except OSError:
        return None
    status = os.fstat(own)
    if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
        return socket.socket(fileno=own)
    os.close(own)
    return None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have closed it already
        connection.shutdown(socket.SHUT_RDWR)
