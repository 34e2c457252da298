"""Sockets of the HTTP servers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

from torchelastic.transport.http import LONGEST

logger = logging.getLogger(__name__)

_END = b"\r\n\r\n"
#: Seconds after the kernel had no descriptors left.
TRY_AGAIN = 1.0


async def listen(address: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there. Raises `OSError` if that is not possible."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Accepted connections, one after the other."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            logger.debug("cannot accept a connection: %s", error)
            await asyncio.sleep(TRY_AGAIN)
            continue
        yield connection


async def receive_head(connection: socket.socket) -> bytes | None:
    """The head of a request, or as much of it as is read; None if the connection ends first."""
    loop = asyncio.get_running_loop()
    head = bytearray()
    while _END not in head and len(head) < LONGEST:
        data = await loop.sock_recv(connection, LONGEST)
        if not data:
            return None
        head += data
    return bytes(head).partition(_END)[0]
