"""Start the page at an address, with a token if needed."""

from __future__ import annotations

import asyncio
import errno
import secrets
import signal
import socket
from collections.abc import Callable

from torchelastic.config import PAGE_ANYWHERE, format_endpoint, parse_endpoint
from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.page_server import JobStateSource, Server
from torchelastic.errors import EXIT_OK
from torchelastic.transport.addresses import loopback_addresses
from torchelastic.transport.credentials import read_secret

#: The default address of the page; if the port is taken, a free one.
HOST, PORT = "127.0.0.1", 29480


async def serve(
    source: JobStateSource,
    address: str,
    token: bytes | None,
    say: Callable[[str], None],
    *,
    until: int | None = None,
) -> int:
    """Serve the page, `say` its address, and return the exit code.

    Ends on SIGINT or SIGTERM, or when the other end of the descriptor `until` is closed. Raises
    `OSError` if it cannot listen.
    """
    host = HOST if address == PAGE_ANYWHERE else parse_endpoint(address)[0]
    if token is None and not loopback_addresses(host):
        token = secrets.token_urlsafe(24).encode()
    access = AccessControl(token)
    server = Server(source, access)
    try:
        where = await _open(server, address)
        say(f"http://{_name(*where)}/{access.query()}")
        await _end(until)
        await server.last_words()
    finally:
        await server.close()
    return EXIT_OK


def load_token(path: str | None, flag: str) -> bytes | None:
    """Read the token; None without a file."""
    return read_secret(path, flag).reveal() if path is not None else None


async def _open(server: Server, address: str) -> tuple[str, int]:
    if address != PAGE_ANYWHERE:
        host, port = parse_endpoint(address)
        return await server.open((*loopback_addresses(host), host)[0], port)
    try:
        return await server.open(HOST, PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return await server.open(HOST, 0)


def _name(host: str, port: int) -> str:
    """Return the address for browsers: the host name if it listens on all interfaces."""
    everywhere = host in ("0.0.0.0", "::")
    return format_endpoint(socket.gethostname() if everywhere else host, port)


async def _end(until: int | None) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, asked.set)
    if until is not None:
        loop.add_reader(until, asked.set)
    await asked.wait()
    if until is not None:
        loop.remove_reader(until)
