"""An agent's listener: its one port, where connections are authenticated and passed to their
handlers.

A connection is a visitor until it has named its protocol version and its job, and has proved that
it has the job's secret, if there is one. Then it belongs to the handler of the purpose in its
hello. Everything is done in the callback that delivers the frame.

A visitor is untrusted: it gets little time, memory and room, and admitted connections never suffer
from it. Rejections are logged once for each source and reason.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from torchelastic.config import parse_endpoint
from torchelastic.errors import TlsError, WireError
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.addresses import LISTEN_BACKLOG
from torchelastic.transport.auth import Secret, is_nonce, new_nonce
from torchelastic.transport.link import Link, notice_lost_peers
from torchelastic.transport.tls import TlsPipe

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds until a visitor must be admitted.
ADMISSION_TIMEOUT = 10.0
#: Most visitors at a time, if this process may open that many files. Thousands of nodes may connect
#: at once, and behind a gateway all have the same address.
MOST_VISITORS = 4096
#: Connections accepted before those that are open are read.
ACCEPTED = 64
#: Most characters of a visitor's message that are quoted back to it.
QUOTED = 100

#: Answers the hello with `Welcome`, `Refusal` or `Elsewhere`, and owns the link from then on.
Handler = Callable[[Link, frames.Hello], None]


class _Visitor:
    """A connection that is not admitted yet."""

    def __init__(self, link: Link, time_is_up: asyncio.TimerHandle) -> None:
        self.link = link
        self.source = source_of(link.remote_addr)
        self.time_is_up = time_is_up

    def refuse(self, sentence: str) -> None:
        """Say why, and end the connection."""
        self.link.send(frames.Refusal(sentence))
        self.link.close()


class Listener:
    """Listens for the connections of one job (of any, if it is None) and passes them to the
    handlers of their purposes."""

    def __init__(
        self,
        job: str | None,
        *,
        secret: Secret | None = None,
        tls: ssl.SSLContext | None = None,
        patience: float = ADMISSION_TIMEOUT,
        most_visitors: int | None = None,
    ) -> None:
        """`patience`: seconds until a visitor must be admitted."""
        self._job = job
        self._secret = secret
        self._tls = tls
        self._patience = patience
        self._handlers: dict[str, Handler] = {}
        #: Returns the address of the workers' store; None: clients that ask for it are rejected.
        self._store_of_workers: Callable[[], str] | None = None
        self._passed_on = TaskSet()
        self._listeners: list[asyncio.Server] = []
        most = most_visitors or _most_visitors()
        self._visitors: AdmissionLimits[_Visitor] = AdmissionLimits(most, most // 2)
        self._told = Told()
        self._closing = False
        self.port = 0

    @property
    def visitors(self) -> int:
        """The number of connections that are not admitted yet."""
        return len(self._visitors)

    @property
    def is_closing(self) -> bool:
        return self._closing

    def serve(self, purpose: str, handler: Handler) -> None:
        """Pass the connections of this purpose to `handler` from now on."""
        self._handlers[purpose] = handler

    def pass_workers_on(self, where: Callable[[], str]) -> None:
        """Connect clients of torch's store with the one at the address that `where` returns."""
        self._store_of_workers = where

    async def listen(self, sockets: Sequence[socket.socket]) -> int:
        """Accept on the sockets of `bind_endpoint`; return the port."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            # Accept only this many at a time, then read the hellos of those that are open.
            listener = await loop.create_server(self._accept, sock=sock, backlog=ACCEPTED)
            self._listeners.append(listener)
            # The queue of the kernel is longer: a client that does not fit waits for a second.
            sock.listen(LISTEN_BACKLOG)
        self.port = int(sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening. Connections that were passed on stay with their handlers."""
        self._closing = True
        for listener in self._listeners:
            listener.close()
        self._passed_on.cancel()
        ends = [visitor.link.ended for visitor in self._visitors]
        for visitor in self._visitors:
            # Not a refusal: the client tries again, and may find the next agent here.
            visitor.link.abort()
        if ends:
            await asyncio.wait(ends)

    # Coming and going

    def _accept(self) -> Link:
        tls = TlsPipe(self._tls, server=True) if self._tls is not None else None
        made, foreign = self._arrived, self._is_worker
        return Link(tls=tls, limit=frames.GREETING_LIMIT, made=made, foreign=foreign)

    def _is_worker(self, link: Link, first: bytes) -> bool:
        """Return whether this is a client of torch's store, which is then passed on."""
        if self._store_of_workers is None or not first.startswith(TORCH_STORE):
            return False
        address = self._store_of_workers()
        if address:
            self._passed_on.add(splice(link.let_go(), first, address))
        return bool(address)

    def _arrived(self, link: Link) -> None:
        if self._closing:
            link.abort()
            return
        loop = asyncio.get_running_loop()
        visitor = _Visitor(link, loop.call_later(self._patience, self._tired_of, link))
        link.ended.add_done_callback(partial(self._gone, visitor))
        link.deliver_to(partial(self._greet, visitor))
        displaced = self._visitors.enter(visitor, visitor.source)
        if displaced is not None:
            self._tell(displaced, "too many connections without a hello")
            displaced.link.abort()

    def _tired_of(self, link: Link) -> None:
        link.abort(WireError("no hello in time"))

    def _gone(self, visitor: _Visitor, ended: asyncio.Future[Exception | None]) -> None:
        visitor.time_is_up.cancel()
        if visitor not in self._visitors:
            return
        self._visitors.leave(visitor)
        # Do not log clients that only check whether the port is open, as load balancers do.
        if isinstance(ended.result(), WireError) and not self._closing:
            tls = isinstance(ended.result(), TlsError)
            self._tell(visitor, "TLS handshake failed" if tls else "not a torchelastic node")

    def _tell(self, visitor: _Visitor, what: str) -> None:
        if self._told.first_time(visitor.source, what):
            log.warning(
                "Rejected a connection from %s: %s. Further ones for this reason are not logged.",
                visitor.source,
                what,
            )

    def _refuse(self, visitor: _Visitor, what: str, sentence: str) -> None:
        self._tell(visitor, what)
        visitor.refuse(sentence)

    # Greeting

    def _greet(self, visitor: _Visitor, payload: bytes) -> None:
        """Check the first frame. If this raises, the client is not ours and its connection just
        ends."""
        hello = frames.parse_hello(payload)
        if isinstance(hello, frames.OtherVersion):
            self._refuse(
                visitor,
                "another version of the rendezvous protocol",
                f"This node uses version {hello.version} of the rendezvous protocol, but the job "
                f"uses version {frames.VERSION}: install the same torchelastic on every node.",
            )
        elif self._secret is not None and not hello.nonce:
            self._refuse(
                visitor,
                "no secret",
                "This job has a secret, but this node has none: give every node of the job the "
                "same secret (--rdzv-secret-file or TORCHELASTIC_SECRET).",
            )
        elif self._secret is None and hello.nonce:
            self._refuse(
                visitor,
                "it has a secret, but this agent has none",
                "This node has a secret, but the rendezvous has none: give every node of the "
                "job the same secret (--rdzv-secret-file or TORCHELASTIC_SECRET).",
            )
        elif self._secret is not None:
            self._challenge(self._secret, visitor, hello, payload)
        else:
            self._admit(visitor, hello)

    def _challenge(
        self, secret: Secret, visitor: _Visitor, hello: frames.Hello, payload: bytes
    ) -> None:
        if not is_nonce(hello.nonce):
            raise WireError("The nonce of a hello is invalid.")
        nonce = new_nonce()
        visitor.link.send(frames.Challenge(nonce, secret.proof("server", payload, nonce)))

        def hear(answer: bytes) -> None:
            proof = frames.parse(answer, frames.PROOFS)
            if secret.proves(proof.proof, "client", payload, nonce):
                self._admit(visitor, hello)
            else:
                # No refusal is sent: a client of ours with another secret stops one step earlier.
                self._tell(visitor, "wrong secret")
                visitor.link.abort()

        visitor.link.deliver_to(hear)

    def _admit(self, visitor: _Visitor, hello: frames.Hello) -> None:
        """Admit a visitor that has the secret, or tell it which job it has reached."""
        handler = self._handlers.get(hello.purpose)
        if self._job is not None and hello.job != self._job:
            self._refuse(
                visitor,
                "it belongs to another job",
                f"The rendezvous belongs to job '{self._job}', not to '{hello.job[:QUOTED]}': "
                "give every node of a job the same --rdzv-id, and every job its own port.",
            )
        elif handler is None:
            self._refuse(
                visitor,
                "unknown purpose of the connection",
                f"This agent does not serve '{hello.purpose[:QUOTED]}': install the same "
                "torchelastic on every node.",
            )
        else:
            visitor.time_is_up.cancel()
            self._visitors.leave(visitor)
            visitor.link.admit()
            visitor.link.keep_frames()
            handler(visitor.link, hello)


def _most_visitors() -> int:
    """Half of the files this process may open: the rest is for admitted connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_VISITORS if files == resource.RLIM_INFINITY else min(MOST_VISITORS, files // 2)


# --- limits on visitors --------------------------------------------------------------------------

# Strangers can open connections faster than they can be checked. Beyond the limits, the oldest is
# dropped: a client of ours says its hello at once and does not wait.

#: The number of entries that `Told` remembers.
REMEMBERED = 256


class AdmissionLimits(Generic[T]):
    """Connections that are not admitted yet, the oldest first."""

    def __init__(self, most: int, most_of_a_source: int) -> None:
        self.most = most
        self.most_of_a_source = most_of_a_source
        #: Visitor -> source. Dicts for their order.
        self._sources: dict[T, str] = {}
        self._visitors: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._sources))

    def __contains__(self, visitor: T) -> bool:
        return visitor in self._sources

    def enter(self, visitor: T, source: str) -> T | None:
        """Add a visitor; return one that must go for it, already removed here."""
        self._sources[visitor] = source
        of_source = self._visitors.setdefault(source, {})
        of_source[visitor] = None
        too_many = len(of_source) > self.most_of_a_source
        if not too_many and len(self._sources) <= self.most:
            return None
        oldest = next(iter(of_source if too_many else self._sources))
        self.leave(oldest)
        return oldest

    def leave(self, visitor: T) -> None:
        """Remove a visitor that is admitted or gone; nothing happens if it already was."""
        source = self._sources.pop(visitor, None)
        if source is None:
            return
        del self._visitors[source][visitor]
        if not self._visitors[source]:
            del self._visitors[source]


class Told:
    """Remembers what was logged about which source, so that it is logged once; forgets old
    sources."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def first_time(self, source: str, what: str) -> bool:
        known = (source, what) in self._told
        self._told[source, what] = None
        self._told.move_to_end((source, what))
        while len(self._told) > self._most:
            self._told.popitem(last=False)
        return not known


def source_of(address: str) -> str:
    """The source that an address belongs to. With IPv6 one machine has a whole network of
    addresses.

    >>> source_of("10.0.0.1"), source_of("::ffff:10.0.0.1"), source_of("2001:db8::5:6:7:8%eth0")
    ('10.0.0.1', '10.0.0.1', '2001:db8::/64')
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))


# --- workers that look for torch's store ---------------------------------------------------------

# torchrun's static rendezvous has torch's store at `--master-port`, and scripts use that port
# directly: `init_process_group("tcp://localhost:29500")`. Here an agent listens there, and every
# generation has its own store: a client that uses torch's protocol is connected to that one.

#: The first bytes of a client of torch's store: a query of type 0 and a number that names the
#: protocol. As the length of a frame of ours, they would be far beyond the limit of a greeting.
TORCH_STORE = b"\x00\xce\xf7\x85\x3c"


class _End(asyncio.Protocol):
    """One of two connections: everything it receives is sent to the other one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End = self
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        notice_lost_peers(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)
        if self.other.transport is not None:
            self.other.transport.close()


def splice(near: asyncio.Transport, first: bytes, address: str) -> asyncio.Task[None]:
    """Connect a transport, of which `first` has been read, with the store at `address`.

    The task ends with the connections; they end when it is cancelled.
    """
    ours, theirs = _End(), _End()
    ours.other, theirs.other = theirs, ours
    ours.transport = near
    near.pause_reading()
    near.set_protocol(ours)
    return asyncio.create_task(_run(ours, theirs, first, address), name="a worker at its store")


async def _run(ours: _End, theirs: _End, first: bytes, address: str) -> None:
    assert ours.transport is not None
    try:
        host, port = parse_endpoint(address)
        await asyncio.get_running_loop().create_connection(lambda: theirs, host, port)
        ours.data_received(first)
        ours.transport.resume_reading()
        await asyncio.wait({ours.over, theirs.over})
    except OSError:
        pass  # the store is gone: its client learns that from the end of the connection
    finally:
        for end in (ours, theirs):
            if end.transport is not None:
                end.transport.abort()
