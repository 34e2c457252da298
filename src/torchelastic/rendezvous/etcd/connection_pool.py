"""Calls and streams over connections that may break, to servers that may fail.

A call is repeated over another connection until it is answered, so all calls must be idempotent.
The pool uses one server until that one does not answer, is unreachable or has no leader; then it
uses the next. The user names the servers: addresses that etcd advertises are ignored. When none
answers for too long, etcd is lost: every call and every stream, now and later, raises
`RendezvousLost`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torchelastic.clock import Clock
from torchelastic.config import format_endpoint
from torchelastic.errors import ConfigError, RendezvousLost, RendezvousRefused, WireError
from torchelastic.rendezvous.etcd import etcd_messages
from torchelastic.rendezvous.etcd.settings import Login, TlsFiles
from torchelastic.rendezvous.store import Json
from torchelastic.transport.addresses import reachable_address
from torchelastic.transport.http_client import HttpConnection

log = logging.getLogger(__name__)

#: Seconds to wait for an answer before the request is repeated over another connection: a leader
#: that has just died loses requests without an error.
ATTEMPT_TIMEOUT = 3.0
#: Seconds to wait for a connection.
CONNECT_TIMEOUT = 2.0
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5
#: Seconds after which the log repeats what it waits for.
REPEAT_INTERVAL = 60.0
#: Idle connections kept for the next calls.
IDLE_LIMIT = 2

#: Errors that may be temporary.
TEMPORARY_ERRORS = (OSError, EOFError, asyncio.TimeoutError, etcd_messages.EtcdBusy)

#: Makes a server that is cut off from its leader answer with an error at once.
_NEEDS_LEADER = {"Grpc-Metadata-hasleader": "true"}

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """The address of an etcd server."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.host, self.port)


class ConnectionPool:
    """The connections to etcd. Must be created in a running loop."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
    ) -> None:
        self.addresses = tuple(addresses)
        #: This node's address on the route to etcd.
        self.local_addr = ""
        #: Done when etcd is lost; its result is the reason.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._tls = tls
        self._login = login
        #: The token that etcd issued for the password.
        self._token = ""
        #: The index of the server in use.
        self._turn = 0
        #: The server that answered last.
        self._good: Address | None = None
        self._idle: list[HttpConnection] = []
        self._streams: set[HttpConnection] = set()

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    @property
    def address(self) -> Address:
        """The server in use."""
        return self.addresses[self._turn]

    def lose(self, sentence: str) -> None:
        """Fail every call and stream for this reason; the first reason stands."""
        if not self.lost.done():
            self.lost.set_result(sentence)

    def close(self) -> None:
        self.lose("This connection to the rendezvous was closed.")
        self._drop_idle()

    def check(self) -> None:
        """Raise `RendezvousLost` if etcd is lost."""
        if self.lost.done():
            raise RendezvousLost(self.lost.result())

    # Asking

    async def call(self, path: str, request: Json, patience: RetryLimit) -> Json:
        """The answer to a request. Raises `etcd_messages.EtcdRefused` if etcd refuses it."""
        body = _body(request)
        while True:
            self.check()
            address = self.address
            try:
                answer = await self._unless_lost(
                    self._exchange(address, path, body), ATTEMPT_TIMEOUT
                )
            except TEMPORARY_ERRORS as error:
                if patience.is_first and isinstance(error, ssl.SSLError):
                    self._not_trusted(address, error)
                self._switch_server(address, error)
                await patience.wait(error)
            except WireError as error:
                self._not_understood(address, error)
            else:
                self._note(address)
                return answer

    async def once(self, path: str, request: Json) -> Json:
        """The answer to a request that is sent only once, even when etcd is lost."""
        return await self._exchange(self.address, path, _body(request))

    async def stream(self, path: str, request: Json) -> AsyncGenerator[Json, None]:
        """The messages of a stream, until the connection breaks; then raises one of
        `TEMPORARY_ERRORS`.

        The first message has a timeout; the others may take any time.
        """
        self.check()
        address = self.address
        try:
            connection = await self._unless_lost(self._open(address), CONNECT_TIMEOUT)
            self._streams.add(connection)
            try:
                async for message in self._messages(connection, path, _body(request)):
                    yield message
            finally:
                self._streams.discard(connection)
                connection.abort()
        except TEMPORARY_ERRORS as error:
            self._switch_server(address, error)
            raise
        except WireError as error:
            self._not_understood(address, error)

    async def _messages(
        self, connection: HttpConnection, path: str, body: bytes
    ) -> AsyncGenerator[Json, None]:
        headers = await self._unless_lost(self._headers(connection), ATTEMPT_TIMEOUT)
        status = await self._unless_lost(connection.begin(path, body, headers), ATTEMPT_TIMEOUT)
        limit: float | None = ATTEMPT_TIMEOUT
        while True:
            line = await self._unless_lost(connection.next_line(), limit)
            try:
                message = etcd_messages.read(status, line)
                etcd_messages.check_watch(message)
            except etcd_messages.EtcdRefused as error:
                self._relogin(error)
                raise
            yield message
            limit = None

    async def _exchange(self, address: Address, path: str, body: bytes) -> Json:
        connection = self._take()
        if connection is None:
            connection = await asyncio.wait_for(self._open(address), CONNECT_TIMEOUT)
        try:
            headers = await self._headers(connection)
            answer = etcd_messages.read(*await connection.post(path, body, headers))
        except etcd_messages.EtcdRefused as error:
            self._give_back(connection)
            self._relogin(error)
            raise
        except BaseException:
            # After any error, a cancellation too, half an answer may be left in the connection.
            connection.abort()
            raise
        self._give_back(connection)
        return answer

    # Who we are

    async def _headers(self, connection: HttpConnection) -> dict[str, str]:
        if self._login is not None and not self._token:
            await self._log_in(connection, self._login)
        return {**_NEEDS_LEADER, "Authorization": self._token} if self._token else _NEEDS_LEADER

    async def _log_in(self, connection: HttpConnection, login: Login) -> None:
        body = _body(etcd_messages.authenticate(login.user, login.password))
        try:
            answer = etcd_messages.read(
                *await connection.post(etcd_messages.AUTHENTICATE, body, _NEEDS_LEADER)
            )
        except etcd_messages.EtcdRefused as error:
            if error.code != etcd_messages.FAILED_PRECONDITION:
                raise RendezvousRefused(
                    f"etcd rejected user '{login.user}' ({error.message}): check etcd_user and "
                    "etcd_password_file."
                ) from error
            log.warning(
                "etcd does not use authentication; the password of '%s' is ignored.", login.user
            )
            self._login = None
        else:
            self._token = etcd_messages.token(answer)

    def _relogin(self, error: etcd_messages.EtcdRefused) -> None:
        """Log in again when the token has expired, or the restarted server does not know it."""
        if self._login is not None and etcd_messages.is_login_over(error):
            self._token = ""
            raise etcd_messages.EtcdBusy(error.message) from error

    # Connections

    def _switch_server(self, address: Address, trouble: BaseException) -> None:
        """Switch to the next server, if this one is still in use.

        Streams move too: a stream alone would never notice that its server is frozen.
        """
        if len(self.addresses) == 1 or address is not self.address:
            return
        self._turn = (self._turn + 1) % len(self.addresses)
        log.debug("etcd at %s: %s; switching to %s", address, _words(trouble), self.address)
        self._drop_idle()
        for connection in self._streams:
            connection.abort()

    def _note(self, address: Address) -> None:
        """Log a change of the server in use, but not every attempt to find one."""
        if self._good is not None and self._good is not address:
            log.info("Switched to etcd at %s; %s did not answer", address, self._good)
        self._good = address

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        # Do not keep a connection to the server used before.
        current = connection.address == (self.address.host, self.address.port)
        if (
            current
            and connection.is_usable
            and len(self._idle) < IDLE_LIMIT
            and not self.lost.done()
        ):
            self._idle.append(connection)
        else:
            connection.abort()

    def _drop_idle(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _open(self, address: Address) -> HttpConnection:
        connection = await HttpConnection.open(address.host, address.port, self._tls)
        self.local_addr = self.local_addr or reachable_address(connection.local_addr, address.host)
        return connection

    # The end

    def _not_understood(self, address: Address, error: WireError) -> NoReturn:
        # A retry would give the same result.
        how = "with" if self._tls else "without"
        hint = "" if self._tls else ", or set protocol=https in --rdzv-conf"
        self._refuse(
            f"The server at {address} is not etcd 3.4 or later {how} TLS ({error}): correct "
            f"--rdzv-endpoint{hint}."
        )

    def _not_trusted(self, address: Address, error: ssl.SSLError) -> NoReturn:
        self._refuse(
            f"TLS connection to etcd at {address} failed ({tls_words(error)}): check "
            "protocol, cacert, cert and key in --rdzv-conf."
        )

    def _refuse(self, sentence: str) -> NoReturn:
        self.lose(sentence)
        raise RendezvousRefused(sentence)

    async def _unless_lost(self, work: Coroutine[Any, Any, T], limit: float | None) -> T:
        """The result of `work`, unless etcd is lost or the time is up first."""
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


class RetryLimit:
    """The retry limit, counted from the first failure."""

    def __init__(
        self, pool: ConnectionPool, seconds: float, clock: Clock, *, first: bool = False
    ) -> None:
        self._pool = pool
        self._seconds = seconds
        self._clock = clock
        #: Whether etcd has not answered yet.
        self.is_first = first
        self._since: float | None = None
        self._say_at = 0.0
        self._pause = FIRST_PAUSE
        #: The number of failures since the last success.
        self._times = 0

    def restore(self) -> None:
        """Reset after a success."""
        self._since = None
        self._pause = FIRST_PAUSE
        self._times = 0

    async def wait(self, trouble: BaseException) -> None:
        """Wait before the next attempt; raise `RendezvousLost` after too long."""
        now = self._clock.now()
        if self._since is None:
            self._since = self._say_at = now
        if now >= self._say_at:
            self._say_at = now + REPEAT_INTERVAL
            log.log(
                # Report it early: the endpoint may have a typing error.
                logging.WARNING if self.is_first else logging.INFO,
                "waiting for etcd at %s: %s",
                self._pool,
                self._words(trouble),
            )
        left = self._since + self._seconds - self._clock.now()
        if left <= 0:
            self._pool.lose(self._verdict(trouble))
        self._times += 1
        if self._times % len(self._pool.addresses):
            self._pool.check()
            return  # another server has not been tried yet
        await asyncio.wait({self._pool.lost}, timeout=min(self._pause, max(left, 0.0)))
        self._pool.check()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _verdict(self, trouble: BaseException) -> str:
        if self.is_first:
            return (
                f"No etcd answered at {self._pool} within {self._seconds:g} s "
                f"({self._words(trouble)}): check that it is running and that --rdzv-endpoint "
                "and protocol are correct."
            )
        return (
            f"Lost etcd at {self._pool}: no answer for {self._seconds:g} s ({_words(trouble)}). "
            "It has exited, is frozen or is unreachable."
        )

    def _words(self, trouble: BaseException) -> str:
        words = _words(trouble)
        if self.is_first and isinstance(trouble, ConnectionResetError | EOFError):
            # The server may or may not give a reason before it closes.
            lack = (
                "the server has no TLS, or does not trust our certificate"
                if self._pool.has_tls
                else "etcd expects TLS"
            )
            return f"{words}; perhaps {lack}"
        return words


def _body(request: Json) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()


def _words(trouble: BaseException) -> str:
    if isinstance(trouble, socket.gaierror):
        return "host name not known"
    if isinstance(trouble, ConnectionRefusedError):
        return "connection refused"
    if isinstance(trouble, asyncio.IncompleteReadError | ConnectionResetError):
        return "etcd closed the connection"
    if isinstance(trouble, asyncio.TimeoutError):
        return "no answer"
    if isinstance(trouble, ssl.SSLError):
        return tls_words(trouble)
    return str(trouble) or type(trouble).__name__


# --- TLS -----------------------------------------------------------------------------------------


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS context for connections to etcd; etcd's host name is checked against its certificate.

    Raises `ConfigError` for unusable files.
    """
    names = ""
    try:
        names = f"cacert={files.cacert}"
        context = ssl.create_default_context(cafile=files.cacert or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.cert:
            names = f"cert={files.cert}" + (f", key={files.key}" if files.key else "")
            # With no password callback, OpenSSL would ask for an encrypted key's password at the
            # terminal.
            context.load_cert_chain(files.cert, files.key or None, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot use {names} for TLS to etcd ({reason}): name PEM files, with an unencrypted "
            "key."
        ) from None
    return context


def tls_words(error: ssl.SSLError) -> str:
    """Describe a TLS error for users."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()
