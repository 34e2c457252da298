"""One HTTP/1.1 connection: the parts of the protocol that etcd's gateway and metadata servers use.

One request at a time, with a JSON body or none. Answers have a length, or come in chunks, possibly
without end: a watch. `fetch` opens a connection for a single request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from torchelastic.config import format_endpoint
from torchelastic.errors import ConfigError, WireError
from torchelastic.transport.addresses import loopback_addresses

#: Bytes an answer, or one line of a stream, may have: more than etcd sends by its own limits.
BODY_LIMIT = 64 * 1024 * 1024
HEADER_LIMIT = 100
#: Seconds between the addresses of a name that has several.
NEXT_ADDRESS = 0.25
#: Seconds the kernel keeps trying to reach a peer that does not acknowledge.
PEER_TIMEOUT = 15

_SOCKET_OPTIONS = (
    # A watch only listens: without these, a server that lost power would seem connected forever.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PEER_TIMEOUT // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PEER_TIMEOUT // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT * 1000),
)


@dataclass(frozen=True)
class Head:
    """The header of an answer."""

    status: int
    chunked: bool
    #: None: until the connection ends.
    length: int | None
    #: Whether the server ends the connection after this answer.
    last: bool


class HttpConnection:
    """A connection to one server. After any exception it must not be used again."""

    def __init__(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.address = (host, port)
        self._reader = reader
        self._writer = writer
        self._usable = True
        self._head = Head(0, chunked=False, length=0, last=False)
        #: Whether the body has been read to its end.
        self._ended = True
        #: The part of the next line that was read.
        self._rest = bytearray()
        sock = writer.get_extra_info("socket")
        for level, option, value in _SOCKET_OPTIONS:
            sock.setsockopt(level, option, value)
        self.local_addr = str(sock.getsockname()[0])

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> HttpConnection:
        """Connect; raises `OSError`, or `ConfigError` for an invalid host name."""
        # The certificate is for the name that was given, whichever address it has.
        name = None if tls is None else host
        # The loopback addresses by themselves: no thread for the name service is needed then.
        *others, final = loopback_addresses(host) or (host,)
        for address in others:
            try:
                streams = await asyncio.open_connection(
                    address, port, ssl=tls, server_hostname=name
                )
            except OSError:
                continue
            return cls(host, port, *streams)
        try:
            streams = await asyncio.open_connection(
                final,
                port,
                happy_eyeballs_delay=NEXT_ADDRESS,
                ssl=tls,
                server_hostname=name,
            )
        except UnicodeError as error:
            raise ConfigError(f"'{host}' is not a host name: correct --rdzv-endpoint.") from error
        return cls(host, port, *streams)

    @property
    def is_usable(self) -> bool:
        """Return whether another request is possible; the server may have closed an idle
        connection."""
        return self._usable and not self._reader.at_eof() and not self._writer.is_closing()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The status and the whole body of the answer."""
        return await self.request("POST", path, body, headers)

    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The status and the whole body of the answer to any method."""
        status = await self.begin(path, body, headers, method)
        parts = bytearray()
        while part := await self._next_part():
            parts += part
            if len(parts) > BODY_LIMIT:
                raise WireError(f"An answer has more than {BODY_LIMIT} bytes.")
        self._usable = not self._head.last
        return status, bytes(parts)

    async def begin(
        self, path: str, body: bytes, headers: Mapping[str, str], method: str = "POST"
    ) -> int:
        """Send a request and read the answer's status; read its body with `next_line`."""
        # Until the answer is read to its end, the next request would get the rest of it.
        self._usable = False
        host = format_endpoint(*self.address)
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{more}\r\n".encode()
            + body
        )
        await self._writer.drain()
        first = await self._text()
        # Checked before waiting for more: an answer that is not HTTP may never end.
        parse_status(first)
        lines = []
        while line := await self._text():
            lines.append(line)
            if len(lines) > HEADER_LIMIT:
                raise WireError("An answer has too many headers.")
        self._head = parse_head(first, lines)
        self._ended = False
        return self._head.status

    async def next_line(self) -> bytes:
        """The next line of the body, when it comes; raises `EOFError` after the last."""
        while (end := self._rest.find(b"\n")) < 0:
            part = await self._next_part()
            if not part:
                raise EOFError("the answer was cut off")
            self._rest += part
            if len(self._rest) > BODY_LIMIT:
                raise WireError(f"A line has more than {BODY_LIMIT} bytes.")
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def abort(self) -> None:
        """End the connection now."""
        self._usable = False
        self._writer.transport.abort()

    async def _text(self) -> bytes:
        """A line outside the body."""
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            raise WireError("The header of an answer has no end.") from error
        return line.rstrip(b"\r\n")

    async def _next_part(self) -> bytes:
        """The next piece of the body; empty after the last."""
        if self._ended:
            return b""
        if self._head.chunked:
            return await self._next_chunk()
        self._ended = True
        if self._head.length is not None:
            return await self._reader.readexactly(self._head.length)
        return await self._reader.read(BODY_LIMIT + 1)

    async def _next_chunk(self) -> bytes:
        size = parse_chunk_size(await self._text())
        if size:
            chunk = await self._reader.readexactly(size)
            await self._text()
            return chunk
        # Trailers, then an empty line.
        while await self._text():
            pass
        self._ended = True
        return b""


async def fetch(
    method: str,
    url: str,
    headers: Mapping[str, str],
    timeout: float,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Send one request without a body; return the status and the body of the answer.

    Raises `OSError` (also for a timeout) or `WireError`. Proxies are not used: metadata servers
    and the API server of a cluster must be asked directly.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme == "https" and tls is None:
        tls = ssl.create_default_context()
    path = parts.path + (f"?{parts.query}" if parts.query else "")

    async def ask() -> tuple[int, bytes]:
        connection = await HttpConnection.open(parts.hostname or "", port, tls)
        try:
            return await connection.request(
                method, path or "/", b"", {**headers, "Connection": "close"}
            )
        finally:
            connection.abort()

    # Not `wait_for`: before Python 3.12 it ignores a cancellation at the moment of the answer.
    asked = asyncio.ensure_future(ask())
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        in_time, _ = await asyncio.wait({asked}, timeout=timeout)
    finally:
        asked.cancel()
    if not in_time:
        raise TimeoutError(f"no answer within {timeout:g} s")
    try:
        return asked.result()
    except EOFError as error:
        raise ConnectionResetError("the connection was closed before the answer ended") from error


def parse_status(line: bytes) -> int:
    """The status in the first line of an answer; raises `WireError` if it is not HTTP."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise WireError("The answer is not HTTP.")
    return int(words[1])


def parse_head(status_line: bytes, headers: list[bytes]) -> Head:
    """Parse the header of an answer."""
    fields = {}
    for line in headers:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip().lower()
    length = fields.get(b"content-length")
    if length is not None and (not length.isdigit() or int(length) > BODY_LIMIT):
        raise WireError("The length of an answer is missing or out of range.")
    chunked = fields.get(b"transfer-encoding") == b"chunked"
    ends = status_line.startswith(b"HTTP/1.0") or fields.get(b"connection") == b"close"
    return Head(
        parse_status(status_line),
        chunked,
        None if length is None else int(length),
        ends or not (chunked or length is not None),
    )


def parse_chunk_size(line: bytes) -> int:
    """The size of the next chunk; 0 for the last."""
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        raise WireError("The answer has an invalid chunk.") from None
    if not 0 <= size <= BODY_LIMIT:
        raise WireError(f"A chunk of {size} bytes exceeds the limit of {BODY_LIMIT}.")
    return size
