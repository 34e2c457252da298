"""Calls and streams over connections that may break.

A call is made again, over another connection, until it is answered; so all calls must be such that
twice is as good as once. When etcd does not answer for longer than our patience, it is lost for
good: every call and every stream, now and later, raises `RendezvousLost`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torchelastic.clock import Clock
from torchelastic.config import format_endpoint
from torchelastic.errors import RendezvousLost, RendezvousRefused, WireError
from torchelastic.rendezvous.etcd import messages
from torchelastic.rendezvous.etcd.http1 import HttpConnection
from torchelastic.rendezvous.store import Json

log = logging.getLogger(__name__)

#: Seconds an answer may take before it is asked for anew, over another connection.
ATTEMPT = 5.0
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5
#: Connections kept for the next call.
IDLE = 2

#: What may be over in a moment.
TROUBLE = (OSError, EOFError, asyncio.TimeoutError, messages.Busy)

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where etcd is."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.host, self.port)


class Line:
    """Our connections to etcd. Made in a running loop."""

    def __init__(self, address: Address, *, clock: Clock) -> None:
        self.address = address
        self.local_addr = ""
        #: Done when etcd is lost; the result says why.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._idle: list[HttpConnection] = []

    def lose(self, sentence: str) -> None:
        """The end of every call and stream, for this reason; the first reason stands."""
        if not self.lost.done():
            self.lost.set_result(sentence)

    def close(self) -> None:
        self.lose("This connection to the rendezvous was closed.")
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def check(self) -> None:
        """Raise `RendezvousLost` if etcd is lost."""
        if self.lost.done():
            raise RendezvousLost(self.lost.result())

    async def call(self, path: str, request: Json, patience: Patience) -> Json:
        """The answer to a request. Raises `messages.Refused` if etcd will not do it."""
        body = json.dumps(request, separators=(",", ":")).encode()
        while True:
            self.check()
            try:
                return await self._unless_lost(self._exchange(path, body), ATTEMPT)
            except TROUBLE as error:
                await patience.wait(error)
            except WireError as error:
                self._not_understood(error)

    async def once(self, path: str, request: Json) -> Json:
        """The answer to a request that is made once only, even when etcd is lost."""
        return await self._exchange(path, json.dumps(request).encode())

    async def stream(self, path: str, request: Json) -> AsyncGenerator[Json, None]:
        """The messages that answer a request, until the connection breaks: one of `TROUBLE` then.

        The first must come soon; the others take their time.
        """
        self.check()
        connection = await self._unless_lost(self._open(), ATTEMPT)
        try:
            body = json.dumps(request).encode()
            status = await self._unless_lost(connection.begin(path, body), ATTEMPT)
            limit: float | None = ATTEMPT
            while True:
                line = await self._unless_lost(connection.next_line(), limit)
                yield messages.read(status, line)
                limit = None
        except WireError as error:
            self._not_understood(error)
        finally:
            connection.abort()

    async def _exchange(self, path: str, body: bytes) -> Json:
        connection = self._take() or await self._open()
        try:
            answer = messages.read(*await connection.post(path, body))
        except messages.Refused:
            self._give_back(connection)
            raise
        except BaseException:
            # Whatever it was, a cancellation included: half an answer may be left in there.
            connection.abort()
            raise
        self._give_back(connection)
        return answer

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        if connection.is_usable and len(self._idle) < IDLE and not self.lost.done():
            self._idle.append(connection)
        else:
            connection.abort()

    async def _open(self) -> HttpConnection:
        connection = await HttpConnection.open(self.address.host, self.address.port)
        self.local_addr = self.local_addr or connection.local_addr
        return connection

    def _not_understood(self, error: WireError) -> NoReturn:
        # Asked again, it would say the same again.
        sentence = (
            f"What answers at {self.address} is not etcd 3.4 or later without TLS ({error}): "
            "correct --rdzv-endpoint."
        )
        self.lose(sentence)
        raise RendezvousRefused(sentence) from error

    async def _unless_lost(self, work: Coroutine[Any, Any, T], limit: float | None) -> T:
        """The result of `work`, unless etcd is lost before, or the time is up."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self.lost}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.check()
            raise asyncio.TimeoutError
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


class Patience:
    """How long to go on asking, counted from when things went wrong."""

    def __init__(self, line: Line, seconds: float, clock: Clock, *, first: bool = False) -> None:
        self._line = line
        self._seconds = seconds
        self._clock = clock
        #: Whether etcd has never answered yet.
        self._first = first
        self._since: float | None = None
        self._pause = FIRST_PAUSE

    def restore(self) -> None:
        """Things go well again."""
        self._since = None
        self._pause = FIRST_PAUSE

    async def wait(self, trouble: BaseException) -> None:
        """Wait before asking again; raises `RendezvousLost` when that has been done long enough."""
        if self._since is None:
            self._since = self._clock.now()
            log.log(
                # Nobody wants to wait for an hour to learn that the endpoint has a typing error.
                logging.WARNING if self._first else logging.INFO,
                "waiting for etcd at %s: %s",
                self._line.address,
                _words(trouble),
            )
        left = self._since + self._seconds - self._clock.now()
        if left <= 0:
            self._line.lose(self._verdict(trouble))
        await asyncio.wait({self._line.lost}, timeout=min(self._pause, max(left, 0.0)))
        self._line.check()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _verdict(self, trouble: BaseException) -> str:
        if self._first:
            return (
                f"No etcd answered at {self._line.address} within {self._seconds:g} s "
                f"({_words(trouble)}): see whether it runs, and whether --rdzv-endpoint names it."
            )
        return (
            f"etcd at {self._line.address} was lost and has not answered for {self._seconds:g} s "
            f"({_words(trouble)}): it has ended, is frozen or cannot be reached."
        )


def _words(trouble: BaseException) -> str:
    if isinstance(trouble, socket.gaierror):
        return "its name is not known"
    if isinstance(trouble, ConnectionRefusedError):
        return "connection refused"
    if isinstance(trouble, asyncio.IncompleteReadError):
        return "it closed the connection"
    if isinstance(trouble, asyncio.TimeoutError):
        return "no answer"
    return str(trouble) or type(trouble).__name__
