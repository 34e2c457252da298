"""A reception that admits whoever may come in, and what may come to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS, Credentials, Secret
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Listener

JOB = "job-1"
SECRET = Secret(b"the secret of this job")
PATIENCE = 10.0


class Echo:
    """Welcomes everybody and sends every frame back."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.hellos: list[frames.Hello] = []

    def admit(self, link: Link, hello: frames.Hello) -> None:
        self.links.append(link)
        self.hellos.append(hello)
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "echo", False))
        link.deliver_to(lambda payload: link.send(frame(payload)))


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@contextlib.asynccontextmanager
async def receiving(**options: Any) -> AsyncIterator[tuple[Listener, Echo]]:
    listener, echo = Listener(options.pop("job", JOB), **options), Echo()
    listener.serve(frames.STORE, echo.admit)
    sockets = bind_endpoint("127.0.0.1", 0)
    assert sockets is not None
    await listener.listen(sockets)
    try:
        yield listener, echo
    finally:
        await listener.close()
        for link in echo.links:
            link.abort()
        if echo.links:
            await asyncio.wait([link.ended for link in echo.links])


async def call(port: int, credentials: Credentials = ANONYMOUS, job: str = JOB) -> Link:
    """A connection that was welcomed."""
    link, _ = await connect_once(Endpoint("127.0.0.1", port, job, credentials), timeout=PATIENCE)
    return link


async def echoed(link: Link, payload: bytes = b"hello again") -> bool:
    """Return whether a connection that was welcomed still works."""
    link.send(frame(payload))
    return await asyncio.wait_for(link.next_frame(), PATIENCE) == payload


class Stranger:
    """A connection that says what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> bytes:
        """The payload of the next frame."""
        length = int.from_bytes(await self._read(4), "big")
        return await self._read(length)

    async def _read(self, count: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(count), PATIENCE)

    async def some(self) -> bytes:
        """The next bytes, however many."""
        return await asyncio.wait_for(self._reader.read(65536), PATIENCE)

    async def end(self) -> bytes:
        """All that is said until the connection is over."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(), PATIENCE)
        return b""

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def stranger(port: int) -> AsyncIterator[Stranger]:
    # A small buffer: who does not read is noticed early.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    made = Stranger(*await asyncio.open_connection(sock=sock))
    try:
        yield made
    finally:
        await made.close()
