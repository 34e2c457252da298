"""An etcd in virtual time, which every node always reaches: faults are between nodes only.

The product's `EtcdStore` runs unchanged; `VirtualPool` replaces its connections. The server answers
in the JSON form of etcd's v3 API: transactions, leases and watches, as far as the store uses them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.virtual_loop import Scheduler
from tests.simulation.virtual_network import ProcessLoop
from torchelastic.chaos import laws
from torchelastic.clock import Clock
from torchelastic.rendezvous.etcd import etcd_messages
from torchelastic.rendezvous.etcd.connection_pool import Address, ConnectionPool, RetryLimit
from torchelastic.rendezvous.store import Json

#: Seconds that a request takes to arrive, and its answer.
LATENCY = 0.001
#: Seconds between two looks for expired leases, as in etcd.
EXPIRY_INTERVAL = 0.5


@dataclass
class _Row:
    value: str
    created: int
    modified: int
    lease: str


@dataclass
class _Lease:
    node: str
    seconds: float
    deadline: float
    keys: dict[bytes, None] = field(default_factory=dict)


@dataclass(eq=False)
class _Watcher:
    first: bytes
    end: bytes
    send: Callable[[Json], None]


class VirtualEtcd:
    """The server: keys, leases, watchers, and the history of all changes."""

    def __init__(self, scheduler: Scheduler, note: Callable[[laws.Event], None]) -> None:
        """`note` receives the beginning and the end of each lease."""
        self._scheduler = scheduler
        self._note = note
        self._revision = 1
        self._rows: dict[bytes, _Row] = {}
        self._leases: dict[str, _Lease] = {}
        #: Leases that another node than their holder has revoked: it may not know yet.
        self._revoked: list[_Lease] = []
        self._watchers: dict[_Watcher, None] = {}
        #: The events of each revision.
        self._history: list[tuple[int, list[Json]]] = []
        scheduler.at(EXPIRY_INTERVAL, self._expire)

    def ask(self, loop: ProcessLoop, node: str, path: str, request: Json) -> asyncio.Future[Json]:
        """The answer to a request of a node, which it gets when its process runs."""
        answered: asyncio.Future[Json] = loop.create_future()

        def deliver(answer: Json | etcd_messages.EtcdRefused) -> None:
            if answered.cancelled():
                return
            if isinstance(answer, etcd_messages.EtcdRefused):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

        def arrive() -> None:
            answer: Json | etcd_messages.EtcdRefused
            try:
                answer = self._perform(node, path, request)
            except etcd_messages.EtcdRefused as error:
                answer = error
            self._send(loop, deliver, answer)

        self._scheduler.at(self._scheduler.now + LATENCY, arrive)
        return answered

    def watch(self, loop: ProcessLoop, request: Json, take: Callable[[Json], None]) -> _Watcher:
        """Send all changes of some keys to a node, from a revision on."""
        wanted = request["create_request"]
        first, end = _keys(wanted)
        watcher = _Watcher(first, end, lambda message: self._send(loop, take, message))

        def arrive() -> None:
            self._watchers[watcher] = None
            watcher.send({"header": self._header(), "created": True})
            for revision, events in self._history:
                if revision >= int(wanted["start_revision"]):
                    self._send_events(watcher, events)

        self._scheduler.at(self._scheduler.now + LATENCY, arrive)
        return watcher

    def unwatch(self, watcher: _Watcher) -> None:
        self._watchers.pop(watcher, None)

    def _send(self, loop: ProcessLoop, take: Callable[[Any], None], message: Any) -> None:
        self._scheduler.at(self._scheduler.now + LATENCY, loop.call_soon, take, message)

    def _send_events(self, watcher: _Watcher, events: Sequence[Json]) -> None:
        wanted = [one for one in events if watcher.first <= one["name"] < watcher.end]
        if wanted:
            watcher.send({"header": self._header(), "events": wanted})

    # Requests

    def _perform(self, node: str, path: str, request: Json) -> Json:
        match path:
            case etcd_messages.TXN:
                return self._transact(request)
            case etcd_messages.GRANT:
                return self._grant(node, request["ID"], float(request["TTL"]))
            case etcd_messages.KEEP_ALIVE:
                return self._keep_alive(request["ID"])
            case etcd_messages.REVOKE:
                return self._revoke(node, request["ID"])
        raise NotImplementedError(f"the virtual etcd has no {path}")

    def _header(self) -> Json:
        return {"revision": str(self._revision)}

    def _transact(self, request: Json) -> Json:
        holds = all(self._compare(condition) for condition in request["compare"])
        work = request["success" if holds else "failure"]
        for one in work:
            lease = one.get("request_put", {}).get("lease", "0")
            if lease != "0" and lease not in self._leases:
                raise _not_found()
        events: list[Json] = []
        parts = [self._operate(one, events) for one in work]
        self._publish(events)
        return {"header": self._header(), "succeeded": holds, "responses": parts}

    def _compare(self, condition: Json) -> bool:
        rows = [row for _, row in self._range(condition)]
        if condition["target"] == "CREATE":
            wanted = int(condition["create_revision"])
            found = {row.created for row in rows}
        else:
            wanted, found = int(condition["mod_revision"]), {row.modified for row in rows}
        return (found or {0}) == {wanted}

    def _operate(self, operation: Json, events: list[Json]) -> Json:
        (kind, request), *_ = operation.items()
        if kind == "request_range":
            return {"response_range": {"kvs": [_shown(*pair) for pair in self._range(request)]}}
        if kind == "request_put":
            self._put(request, events)
            return {"response_put": {}}
        for key, _ in [*self._range(request)]:
            self._delete(key, events)
        return {"response_delete_range": {}}

    def _range(self, request: Json) -> Iterator[tuple[bytes, _Row]]:
        first, end = _keys(request)
        if "range_end" not in request:
            return iter([(first, self._rows[first])] if first in self._rows else [])
        return iter([(key, row) for key, row in self._rows.items() if first <= key < end])

    def _put(self, request: Json, events: list[Json]) -> None:
        key, revision = base64.b64decode(request["key"]), self._revision + 1
        before, lease = self._rows.get(key), request["lease"]
        if before is not None and before.lease in self._leases:
            del self._leases[before.lease].keys[key]
        created = before.created if before is not None else revision
        row = self._rows[key] = _Row(request["value"], created, revision, lease)
        if lease != "0":
            self._leases[lease].keys[key] = None
        events.append({"name": key, "kv": _shown(key, row)})

    def _delete(self, key: bytes, events: list[Json]) -> None:
        row = self._rows.pop(key)
        if row.lease in self._leases:
            self._leases[row.lease].keys.pop(key, None)
        kv = {"key": _pack(key), "mod_revision": str(self._revision + 1)}
        events.append({"name": key, "type": "DELETE", "kv": kv})

    def _publish(self, events: list[Json]) -> None:
        if not events:
            return
        self._revision += 1
        self._history.append((self._revision, events))
        for watcher in self._watchers:
            self._send_events(watcher, events)

    # Leases

    def _grant(self, node: str, lease: str, seconds: float) -> Json:
        self._leases[lease] = _Lease(node, seconds, self._scheduler.now + seconds)
        self._revoked = [one for one in self._revoked if one.node != node]
        self._note(laws.LeaseOpened(self._scheduler.now, node))
        return {"header": self._header(), "ID": lease, "TTL": str(int(seconds))}

    def _keep_alive(self, lease: str) -> Json:
        found = self._leases.get(lease)
        if found is None:
            return {"header": self._header()}
        found.deadline = self._scheduler.now + found.seconds
        return {"header": self._header(), "TTL": str(int(found.seconds))}

    def _revoke(self, node: str, lease: str) -> Json:
        found = self._leases.get(lease)
        if found is None:
            raise _not_found()
        if found.node == node:
            self._note(laws.LeaseOver(self._scheduler.now, node))
        else:
            self._revoked.append(found)
        self._end(lease)
        return {"header": self._header()}

    def _end(self, lease: str) -> None:
        events: list[Json] = []
        for key in [*self._leases[lease].keys]:
            self._delete(key, events)
        del self._leases[lease]
        self._publish(events)

    def _expire(self) -> None:
        now = self._scheduler.now
        for lease, found in [*self._leases.items()]:
            if found.deadline <= now:
                self._note(laws.LeaseOver(now, found.node))
                self._end(lease)
        for found in self._revoked:
            if found.deadline <= now:
                self._note(laws.LeaseOver(now, found.node))
        self._revoked = [one for one in self._revoked if one.deadline > now]
        self._scheduler.at(now + EXPIRY_INTERVAL, self._expire)


class VirtualPool(ConnectionPool):
    """The connections of one process to the virtual etcd, which never break."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        clock: Clock,
        etcd: VirtualEtcd,
        loop: ProcessLoop,
        node: str,
    ) -> None:
        super().__init__(addresses, clock=clock)
        self._etcd, self._loop, self._node = etcd, loop, node
        self.local_addr = loop.machine.address

    async def call(self, path: str, request: Json, patience: RetryLimit) -> Json:
        self.check()
        answer = await self.once(path, request)
        self.check()
        return answer

    async def once(self, path: str, request: Json) -> Json:
        return await self._etcd.ask(self._loop, self._node, path, request)

    async def stream(self, path: str, request: Json) -> AsyncGenerator[Json, None]:
        self.check()
        messages: asyncio.Queue[Json] = asyncio.Queue()
        watcher = self._etcd.watch(self._loop, request, messages.put_nowait)
        try:
            while True:
                yield await self._unless_lost(messages.get(), None)
        finally:
            self._etcd.unwatch(watcher)


def _keys(request: Json) -> tuple[bytes, bytes]:
    first = base64.b64decode(request["key"])
    return first, base64.b64decode(request.get("range_end", ""))


def _pack(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _shown(key: bytes, row: _Row) -> Json:
    return {
        "key": _pack(key),
        "value": row.value,
        "create_revision": str(row.created),
        "mod_revision": str(row.modified),
        "lease": row.lease,
    }


def _not_found() -> etcd_messages.EtcdRefused:
    return etcd_messages.EtcdRefused(etcd_messages.NOT_FOUND, "requested lease not found")
