"""An HTTP server of the agent for short answers: metrics and health.

Clients must not slow the job down. So connections are accepted one by one with a pause in between,
few are open at a time and none for long, and the newest replaces the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from torchelastic.side_tasks import TaskSet, Work
from torchelastic.transport import http, http_socket

logger = logging.getLogger(__name__)

#: Connections at a time, and those the kernel queues.
MOST_CONNECTIONS, BACKLOG = 8, 8
#: Seconds between two connections, and for one connection.
GAP, REQUEST_TIMEOUT = 0.02, 5.0

Background = Callable[[Work, str], object]


class ShortAnswers:
    """Serves at one socket what `respond` makes of a request; None: it was not HTTP."""

    def __init__(self, respond: Callable[[http.Request | None], Awaitable[bytes]]) -> None:
        self._respond = respond
        self._listener: socket.socket | None = None
        self._talks = TaskSet()

    def open(self, listener: socket.socket, background: Background, name: str) -> None:
        """Serve at a socket that listens, in a side task of this name."""
        self._listener = listener
        background(partial(self._accept, listener), name)

    async def close(self) -> None:
        await self._talks.close()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in http_socket.accepted(listener):
            if len(self._talks) >= MOST_CONNECTIONS:
                next(iter(self._talks)).cancel()  # the oldest
            self._talks.start(self._talk(connection), "request")
            await asyncio.sleep(GAP)

    async def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                await asyncio.wait_for(self._answer(connection), REQUEST_TIMEOUT)
            except (OSError, asyncio.TimeoutError) as error:
                logger.debug("a client disconnected: %r", error)
            except Exception:  # nothing awaits this task
                logger.exception("Could not answer a request.")

    async def _answer(self, connection: socket.socket) -> None:
        head = await http_socket.receive_head(connection)
        if head is None:
            return
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, await self._respond(http.parse(head)))
        connection.shutdown(socket.SHUT_WR)
