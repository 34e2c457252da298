"""The store, served to the connections that the listener of its agent admits.

Every request is handled in the callback that delivers it: read, change the table, write the answer.
So requests run one after the other, there are no tasks, and an idle server only answers
keep-alives. Watchers are notified after all requests that arrived together, in one message: a
client that watches a thousand joining nodes reads few messages. One timer, set to the earliest
deadline, ends leases.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from torchelastic.clock import Clock, SystemClock
from torchelastic.errors import LeaseExpired, WireError
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.frames import Row
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Listener, Told, source_of

log = logging.getLogger(__name__)

#: Seconds for a client whose connection ended to come back and resume its lease.
RECONNECT_GRACE = 0.05
#: The most unsent bytes for a client; beyond, it is disconnected.
BACKLOG_LIMIT = 16 * 1024 * 1024
#: Seconds to deliver the last message of a closing connection.
CLOSE_TIMEOUT = 1.0

HOST_EXITED = "The agent that hosted the rendezvous has exited."


class _Peer:
    """A client of the server."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.lease: str | None = None
        self.prefixes: set[str] = set()

    def refuse(self, sentence: str) -> None:
        """Send the reason, and end the connection."""
        self.link.send(frames.Refusal(sentence))
        self.link.close()


class EmbeddedServer:
    """Hosts the store of one job."""

    def __init__(
        self,
        job: str,
        *,
        clock: Clock | None = None,
        grace: float = RECONNECT_GRACE,
        backlog: int = BACKLOG_LIMIT,
        table: Table | None = None,
        term: int = 0,
        grace_of: Callable[[Sequence[Row]], Awaitable[float | None]] | None = None,
        name: str = "",
    ) -> None:
        """`table` and `name` belong to the store that this one continues."""
        self._job = job
        self._clock = clock or SystemClock()
        self._grace = grace
        self._backlog = backlog
        self._table = table or Table()
        #: The term of the hosting agent; 0: a server that no node would replace.
        self._term = term
        #: If the name has changed, a client that comes back has lost its store.
        self._name = name or secrets.token_hex(8)
        self._listener: Listener | None = None
        self._peers: set[_Peer] = set()
        #: The watchers of each prefix; a dict, because it keeps their order.
        self._watchers: dict[str, dict[_Peer, None]] = {}
        #: The connection that holds each lease; none while its client is disconnected.
        self._holders: dict[str, _Peer] = {}
        #: Changes that watchers have not received yet.
        self._news: list[Row] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Gives the seconds for a client, with these rows under its lease, to come back after its
        #: connection ended; None: until its lease ends.
        self._grace_of = grace_of
        self._asking = TaskSet()
        self._departure = asyncio.Event()
        self._told = Told()
        self._closing = False
        self.port = 0

    async def start(self, sockets: Sequence[socket.socket]) -> int:
        """Serve with its own listener, for a store without an agent; return the port."""
        self._listener = Listener(self._job)
        self._listener.serve(frames.STORE, self.admit)
        self.port = await self._listener.listen(sockets)
        return self.port

    def resume(self) -> None:
        """For a continued table: end the leases of clients that do not come back in time."""
        self._set_timer()

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return len(self._peers)

    async def wait_alone(self, timeout: float, *, own: int = 0) -> bool:
        """Wait until at most `own` clients are connected; False if more still are."""
        deadline = self._clock.now() + timeout
        while self.clients > own:
            self._departure.clear()
            left = deadline - self._clock.now()
            try:
                await asyncio.wait_for(self._departure.wait(), max(left, 0.0))
            except asyncio.TimeoutError:
                return self.clients <= own
        return True

    def rows(self, prefix: str) -> list[Row]:
        """The rows under a prefix."""
        return self._table.get(prefix)

    async def close(self, sentence: str = HOST_EXITED) -> None:
        """Stop, and tell clients that it will not come back."""
        self._closing = True
        self._stop()
        if self._listener is not None:
            await self._listener.close()
        ends = [peer.link.ended for peer in self._peers]
        for peer in self._peers:
            peer.refuse(sentence)
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_TIMEOUT)
        for peer in self._peers:
            peer.link.abort()
        if ends:
            await asyncio.wait(ends)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._asking.cancel()

    async def abandon(self) -> None:
        """Stop without telling clients, as if the process had died: they wait for the next one."""
        self._closing = True
        self._stop()
        ends = [peer.link.ended for peer in self._peers]
        for peer in self._peers:
            peer.link.abort()
        if ends:
            await asyncio.wait(ends)

    # Connections

    def admit(self, link: Link, hello: frames.Hello) -> None:
        """Serve a client that the listener has admitted."""
        peer = _Peer(link)
        link.give_up_at(self._backlog)
        link.ended.add_done_callback(partial(self._gone, peer))
        if self._closing:
            peer.refuse(HOST_EXITED)
            return
        self._peers.add(peer)
        if hello.lease is not None and self._table.keep_alive(hello.lease, self._clock.now()):
            self._hold(peer, hello.lease)
        resumed = peer.lease is not None
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, self._name, resumed, self._term))
        link.deliver_to(partial(self._serve, peer))

    def _hold(self, peer: _Peer, token: str) -> None:
        """Bind a lease to this connection; an older connection of the lease is dead."""
        before = self._holders.get(token)
        if before is not None and before is not peer:
            before.lease = None
            before.link.abort()
        self._holders[token] = peer
        peer.lease = token

    def _gone(self, peer: _Peer, ended: asyncio.Future[Exception | None]) -> None:
        self._peers.discard(peer)
        for prefix in peer.prefixes:
            self._unwatch(peer, prefix)
        if error := ended.result():
            log.debug("A client's connection ended: %s.", error)
        if peer.lease is not None and not self._closing:
            del self._holders[peer.lease]
            # The client may live, behind a firewall.
            if self._grace_of is None:
                self._shorten(peer.lease, self._grace)
            else:
                self._asking.start(self._ask_after(peer.lease), "ask after a client")
        self._departure.set()

    async def _ask_after(self, token: str) -> None:
        """Shorten its lease as far as allowed, unless the client has come back."""
        assert self._grace_of is not None
        grace = await self._grace_of(self._table.under(token))
        if grace is not None and token not in self._holders:
            self._shorten(token, grace)

    def _shorten(self, token: str, grace: float) -> None:
        self._table.shorten(token, self._clock.now() + grace)
        self._set_timer()

    # Requests

    def _serve(self, peer: _Peer, payload: bytes) -> None:
        try:
            self._perform(peer, frames.parse(payload, frames.REQUESTS))
        except WireError as error:
            if self._told.first_time(source_of(peer.link.remote_addr), "nonsense"):
                log.warning("Disconnected a rendezvous client: %s", error)
            peer.refuse(str(error))

    def _perform(self, peer: _Peer, request: frames.Message) -> None:
        match request:
            case frames.Put():
                self._put(peer, request)
            case frames.Report():
                self._take_report(peer, request)
            case frames.KeepAlive(id=id):
                self._keep_alive(peer, id)
            case frames.Get(id=id, prefix=prefix):
                self._send_rows(peer, id, self._table.get(prefix))
            case frames.Watch():
                self._watch(peer, request)
            case frames.Unwatch(prefix=prefix):
                peer.prefixes.discard(prefix)
                self._unwatch(peer, prefix)
            case frames.OpenLease():
                self._open_lease(peer, request)
            case frames.GiveUp():
                self._give_up(peer, request)
            case frames.Bye():
                self._end_lease(peer)
                peer.link.close()

    def _put(self, peer: _Peer, put: frames.Put) -> None:
        revision = self._table.revision_of(put.stamp)
        if revision is not None:
            peer.link.send(frames.Done(put.id, revision))
            return
        # Disconnect its writer, rather than every client that would read it.
        for text in (put.value, *put.beside.values()):
            frames.decode_value(text)
        try:
            rows = self._table.put(
                put.key,
                put.value,
                expected=put.expected,
                lease=(peer.lease or "") if put.leased else None,
                beside=put.beside,
                provided=put.provided,
                stamp=put.stamp,
            )
        except LeaseExpired:
            peer.link.send(frames.NoLease(put.id))
            return
        peer.link.send(frames.Done(put.id, rows[-1].modified if rows else None))
        self._publish(rows)

    def _take_report(self, peer: _Peer, report: frames.Report) -> None:
        frames.decode_value(report.value)
        try:
            rows = self._table.put(report.key, report.value, lease=peer.lease or "")
        except LeaseExpired:
            peer.link.send(frames.NoLease(report.id))
            return
        self._publish(rows)

    def _send_rows(self, peer: _Peer, id: int, rows: list[Row]) -> None:
        portions = frames.batches(rows)
        for number, portion in enumerate(portions, start=1):
            last = number == len(portions)
            peer.link.send(frames.pack_rows(id, self._table.revision, portion, last))

    def _watch(self, peer: _Peer, watch: frames.Watch) -> None:
        if watch.after is None:
            rows: list[Row] | None = self._table.get(watch.prefix)
        else:
            rows = self._table.since(watch.prefix, watch.after)
        if rows is None:
            peer.refuse("This agent was disconnected for too long to catch up.")
            return
        self._send_rows(peer, watch.id, rows)
        peer.prefixes.add(watch.prefix)
        self._watchers.setdefault(watch.prefix, {})[peer] = None

    def _unwatch(self, peer: _Peer, prefix: str) -> None:
        watchers = self._watchers.get(prefix, {})
        watchers.pop(peer, None)
        if not watchers:
            self._watchers.pop(prefix, None)

    def _publish(self, rows: Sequence[Row]) -> None:
        """Schedule a message to the watchers with all changes made until the loop runs it."""
        if rows and not self._news:
            asyncio.get_running_loop().call_soon(self._tell_watchers)
        self._news += rows

    def _tell_watchers(self) -> None:
        """Send each watcher its changes. A prefix is encoded once for all its watchers; a client
        with several prefixes gets all of them together, oldest change first."""
        rows, self._news = self._news, []
        told: dict[_Peer, bytes] = {}
        for prefix, news in self._by_prefix(rows):
            data = b"".join(
                frames.pack(frames.Changed(prefix, portion)) for portion in frames.batches(news)
            )
            for peer in self._watchers[prefix]:
                told[peer] = told[peer] + data if peer in told else data
        for peer, data in told.items():
            peer.link.send(data)

    def _by_prefix(self, rows: list[Row]) -> list[tuple[str, list[Row]]]:
        """The rows under each watched prefix, found without checking every prefix."""
        lengths = {len(prefix) for prefix in self._watchers}
        found: dict[str, list[Row]] = {}
        for row in rows:
            for length in lengths:
                prefix = row.key[:length]
                if len(prefix) == length and prefix in self._watchers:
                    found.setdefault(prefix, []).append(row)
        return sorted(found.items(), key=lambda item: item[1][-1].modified)

    # Leases

    def _open_lease(self, peer: _Peer, request: frames.OpenLease) -> None:
        if not (math.isfinite(request.seconds) and request.seconds > 0):
            raise WireError(f"A lease of {request.seconds} s is not possible.")
        if not 16 <= len(request.token) <= frames.TOKEN_LIMIT:
            raise WireError("A lease token needs at least 16 characters.")
        if peer.lease != request.token:
            self._end_lease(peer)
        self._table.open_lease(request.token, request.seconds, self._clock.now())
        self._hold(peer, request.token)
        self._set_timer()
        peer.link.send(frames.Done(request.id, None))

    def _keep_alive(self, peer: _Peer, id: int) -> None:
        alive = peer.lease is not None and self._table.keep_alive(peer.lease, self._clock.now())
        peer.link.send(frames.Done(id, None) if alive else frames.NoLease(id))

    def _end_lease(self, peer: _Peer) -> None:
        if peer.lease is not None:
            token, peer.lease = peer.lease, None
            del self._holders[token]
            self._publish(self._table.end_lease(token))

    def _set_timer(self) -> None:
        """Let the timer fire no later than the next deadline.

        Keep-alives only postpone deadlines, so they do not touch the timer; it sometimes fires
        early.
        """
        due = self._table.next_deadline()
        if due is None:
            return
        loop = asyncio.get_running_loop()
        delay = max(due - self._clock.now(), 0.0)
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for token, rows in self._table.expire(self._clock.now()).items():
            self._lease_over(token, rows)
        self._set_timer()

    def _give_up(self, peer: _Peer, request: frames.GiveUp) -> None:
        is_so = self._table.created(request.key) == request.created
        if request.provided is not None:
            is_so = is_so and self._table.is_unchanged(*request.provided)
        token = self._table.lease_of(request.key) if is_so else None
        if token is not None:
            self._lease_over(token, self._table.end_lease(token))
        peer.link.send(frames.Done(request.id, None))

    def _lease_over(self, token: str, rows: list[Row]) -> None:
        """Tell the holder of an ended lease, and the watchers of its keys."""
        holder = self._holders.pop(token, None)
        if holder is not None:
            holder.lease = None
            holder.link.send(frames.LeaseEnded(token))
        self._publish(rows)
