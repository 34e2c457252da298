"""One TCP connection that carries frames; the same at both ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable

from torchelastic.errors import TlsError, WireError
from torchelastic.transport.frames import FRAME_LIMIT, Message, Refusal, Unpacker, pack
from torchelastic.transport.tls import TlsPipe, is_tls

#: Seconds the kernel keeps trying to reach a peer that does not acknowledge.
PEER_TIMEOUT = 15

_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # Without these, a machine that lost power would seem connected forever.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PEER_TIMEOUT // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PEER_TIMEOUT // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT * 1000),
)
_OTHER_KIND = (
    "Some nodes use TLS and some do not: give every node --rdzv-tls-cert, --rdzv-tls-key and "
    "--rdzv-tls-ca, or none."
)


def notice_lost_peers(sock: socket.socket) -> None:
    """Let the kernel end a connection whose peer is gone."""
    for level, option, value in _SOCKET_OPTIONS:
        sock.setsockopt(level, option, value)


class _Desk(threading.local):
    """The receive buffer of a thread's loop, emptied in the same callback: a buffer for each of
    thousands of connections, or for every frame, would cost more than the frames."""

    def __init__(self) -> None:
        self.room = bytearray(64 * 1024)


_desk = _Desk()


class Link(asyncio.BufferedProtocol):
    """Whole frames in and out; `ended` says that it is over, and why. Made in a running loop."""

    def __init__(
        self,
        *,
        tls: TlsPipe | None = None,
        limit: int = FRAME_LIMIT,
        made: Callable[[Link], None] | None = None,
        foreign: Callable[[Link, bytes], bool] | None = None,
    ) -> None:
        """`limit` is the largest frame in bytes; `made` is called when there is a connection.
        `foreign` sees the first bytes, and returns whether it has taken over the connection."""
        #: Done when the connection is over; the result is the error that ended it, if any.
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.local_addr = ""
        #: The address of the peer.
        self.remote_addr = ""
        #: Bytes not yet sent at which the connection is given up; None: never.
        self._backlog: int | None = None
        self._transport: asyncio.Transport | None = None
        self._made = made
        self._foreign = foreign
        self._tls = tls
        self._first = True
        self._unpacker = Unpacker(limit)
        self._handler: Callable[[bytes], None] | None = None
        #: Frames that arrived before they were requested.
        self._early: deque[bytes] = deque()
        self._wanted: asyncio.Future[bytes] | None = None
        self._error: Exception | None = None

    # What the owner calls

    def admit(self) -> None:
        """Allow frames of any size: the peer is one of ours."""
        self._unpacker.limit = FRAME_LIMIT

    def deliver_to(self, handler: Callable[[bytes], None]) -> None:
        """Pass every frame to `handler`, beginning with those already here.

        If it raises `WireError`, the connection ends.
        """
        self._handler = handler
        self._resume()
        try:
            while self._early and not self.is_closing:
                handler(self._early.popleft())
        except WireError as error:
            self.abort(error)

    def keep_frames(self) -> None:
        """Keep frames until they are asked for.

        Once one has come, nothing more is read, so that no peer can fill the memory; the end of the
        connection is not noticed then either.
        """
        self._handler = None

    def give_up_at(self, backlog: int) -> None:
        """End the connection when the peer leaves this many bytes unread."""
        self._backlog = backlog
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=backlog)

    def next_frame(self) -> asyncio.Future[bytes]:
        """The next frame, for the greeting, or the error that ended the connection."""
        wanted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # If the caller gives up waiting, asyncio must not print the unused error.
        wanted.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._early:
            wanted.set_result(self._early.popleft())
        elif self.ended.done():
            wanted.set_exception(self.ended.result() or EOFError("the connection was closed"))
        else:
            self._resume()
            self._wanted = wanted
        return wanted

    def send(self, message: Message | bytes) -> None:
        """Send a message, or a packed frame; nothing happens if the connection is over."""
        if self._transport is None or self._transport.is_closing():
            return
        frame = message if isinstance(message, bytes) else pack(message)
        if self._tls is None:
            self._transport.write(frame)
        else:
            self._tls.encrypt(frame)
            self._transport.write(self._tls.outgoing())

    def close(self) -> None:
        """End the connection once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """End the connection now."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()
        elif not self.ended.done():
            # Never connected: no callback will report the end.
            self.ended.set_result(self._error)

    def detach(self) -> tuple[socket.socket, TlsPipe | None]:
        """Take the socket, for a protocol other than frames; the link is over then.

        Raises `WireError` if bytes are in transit: they would be lost, or come twice.
        """
        if self._transport is None or self._transport.is_closing():
            raise WireError("The connection is closed.")
        if self._early or self._unpacker.is_amid or self._transport.get_write_buffer_size():
            raise WireError("The peer sends before it is asked, or does not read.")
        taken: socket.socket = self._transport.get_extra_info("socket").dup()
        # Closes only asyncio's descriptor: the connection stays open through another one.
        self._transport.abort()
        return taken, self._tls

    def let_go(self) -> asyncio.Transport:
        """Give the connection to another protocol; the link is over then."""
        assert self._transport is not None
        transport, self._transport = self._transport, None
        self.ended.set_result(None)
        return transport

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        notice_lost_peers(sock)
        self.local_addr = sock.getsockname()[0]
        self.remote_addr = (transport.get_extra_info("peername") or ("",))[0]
        if self._tls is not None:
            self._tls.begin()
            transport.write(self._tls.outgoing())
        if self._made is not None:
            self._made(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return _desk.room

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(memoryview(_desk.room)[:nbytes])
        if self._first:
            self._first = False
            if self._foreign is not None and self._foreign(self, data):
                return
            if is_tls(data) != (self._tls is not None):
                self._part_from_the_other_kind()
                return
        try:
            for payload in self._unpacker.feed(self._plain(data)):
                self._hand_over(payload)
                if self.is_closing:
                    return
            if self._tls is not None and self._tls.ended:
                self.close()
        except TlsError as error:
            self._error = error
            self.close()  # not at once: TLS itself has sent the peer a word on why
        except WireError as error:
            self.abort(error)

    def _part_from_the_other_kind(self) -> None:
        """End a connection where only one end uses TLS, in a way that both ends understand."""
        assert self._transport is not None
        self._error = TlsError(
            "the peer uses TLS" if self._tls is None else "the peer does not use TLS"
        )
        self._transport.write(pack(Refusal(_OTHER_KIND)))
        self.close()

    def _plain(self, data: bytes) -> bytes:
        if self._tls is None:
            return data
        try:
            return self._tls.decrypt(data)
        finally:
            if self._transport is not None and (answer := self._tls.outgoing()):
                self._transport.write(answer)

    def _hand_over(self, payload: bytes) -> None:
        if self._handler is not None:
            self._handler(payload)
        elif self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(payload)
        else:
            self._early.append(payload)
            if self._transport is not None:
                self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Drop a peer that reads slower than we write, rather than lose memory or time."""
        if self._backlog is not None:
            self.abort(ConnectionError("the peer does not read what it is sent"))

    def connection_lost(self, exc: Exception | None) -> None:
        error = self._error or exc
        if not self.ended.done():
            self.ended.set_result(error)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_exception(error or EOFError("the connection was closed"))
