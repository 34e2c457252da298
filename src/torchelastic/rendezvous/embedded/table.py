"""The store's state as plain data: rows, revisions, leases, and enough history to catch up from.

Pure: no socket, no clock, no task. The owner of a `Table` passes `now` and notifies the watchers.
Values are kept as the JSON text they came in: the table does not interpret them, text takes a
fraction of the memory, and no caller can change a shared value.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torchelastic.errors import LeaseExpired
from torchelastic.transport.frames import Row

#: The most changes kept in full, and the most characters of their values.
HISTORY_ROWS_LIMIT = 4096
HISTORY_CHARS_LIMIT = 8 * 1024 * 1024
#: The most deleted keys remembered by name, for clients that are behind the history.
TOMBSTONES_LIMIT = 65536


@dataclass
class Lease:
    """A promise to keep some keys until `deadline`, which every keep-alive moves."""

    seconds: float
    deadline: float
    #: The deadline of its valid entry in the heap, which is not later; other entries are ignored.
    queued: float
    #: Keys in the order they were put, in which they are deleted.
    keys: dict[str, None] = field(default_factory=dict)


def _kind(key: str) -> str:
    """The first part of a key: `member` of `member/8f2c`."""
    return key.partition("/")[0]


class ChangeHistory:
    """The last changes in full, and the request that made each.

    Separate for each kind of key: a client that follows only the key `world` does not search the
    changes of thousands of members.
    """

    def __init__(self, rows: int, chars: int) -> None:
        self._max_rows = rows
        self._max_chars = chars
        self._chars = 0
        self._rows: deque[tuple[Row, str]] = deque()
        self._by_kind: dict[str, deque[Row]] = {}
        self._stamps: dict[str, int] = {}
        #: Every change after this revision is here.
        self.floor = 0

    def append(self, row: Row, stamp: str) -> None:
        self._rows.append((row, stamp))
        self._by_kind.setdefault(_kind(row.key), deque()).append(row)
        self._chars += len(row.text or "")
        if stamp:
            self._stamps[stamp] = row.modified
        while len(self._rows) > self._max_rows or self._chars > self._max_chars:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        row, stamp = self._rows.popleft()
        self._by_kind[_kind(row.key)].popleft()  # the oldest change is the oldest of its kind
        self._chars -= len(row.text or "")
        self._stamps.pop(stamp, None)
        self.floor = row.modified

    def since(self, prefix: str, after: int) -> list[Row]:
        """The changes under a prefix after a revision that is not below `floor`, oldest first."""
        kind = _kind(prefix)
        kinds = [kind] if "/" in prefix else [k for k in self._by_kind if k.startswith(kind)]
        found: list[Row] = []
        for kind in kinds:
            newer = takewhile(
                lambda row: row.modified > after, reversed(self._by_kind.get(kind, ()))
            )
            found += (row for row in newer if row.key.startswith(prefix))
        return sorted(found, key=lambda row: row.modified)

    def revision_of(self, stamp: str) -> int | None:
        """The revision made by the request with this stamp, if it is remembered."""
        return self._stamps.get(stamp)


class Table:
    """Keys, leases and revisions. Every change has its own revision."""

    def __init__(
        self,
        *,
        history_rows: int = HISTORY_ROWS_LIMIT,
        history_chars: int = HISTORY_CHARS_LIMIT,
        tombstones: int = TOMBSTONES_LIMIT,
    ) -> None:
        self.revision = 0
        self._rows: dict[str, Row] = {}
        #: The sorted keys: those under a prefix are found without searching the others.
        self._keys: list[str] = []
        self._leases: dict[str, Lease] = {}
        #: A heap of the earliest time when each lease may end.
        self._deadlines: list[tuple[float, str]] = []
        #: The lease each leased key is under.
        self._owners: dict[str, str] = {}
        self._history = ChangeHistory(history_rows, history_chars)
        #: The deletions of keys that are still absent, oldest first.
        self._tombstones: dict[str, Row] = {}
        self._max_tombstones = tombstones
        #: Every deletion after this revision is in `_tombstones`.
        self._tombstones_floor = 0

    # Reading

    def get(self, prefix: str) -> list[Row]:
        """The rows under a prefix, in order of arrival."""
        return sorted(self._under(prefix), key=lambda row: row.created)

    def _under(self, prefix: str) -> Iterator[Row]:
        for index in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[index]
            if not key.startswith(prefix):
                return
            yield self._rows[key]

    def since(self, prefix: str, after: int) -> list[Row] | None:
        """Every change under a prefix after a revision, in order.

        Beyond the history, only the last change of each key is returned; a watcher ends up with the
        same keys. None: even the deletions do not reach back that far.
        """
        if after >= self._history.floor:
            return self._history.since(prefix, after)
        if after == 0 or after >= self._tombstones_floor:
            return self._last_changes(prefix, after)
        return None

    def _last_changes(self, prefix: str, after: int) -> list[Row]:
        gone = (row for row in self._tombstones.values() if row.key.startswith(prefix))
        changed = [row for row in (*self._under(prefix), *gone) if row.modified > after]
        return sorted(changed, key=lambda row: row.modified)

    def created(self, key: str) -> int:
        """The revision that created a key, 0 if it is absent."""
        row = self._rows.get(key)
        return row.created if row else 0

    def lease_of(self, key: str) -> str | None:
        """The lease a key is under."""
        return self._owners.get(key)

    def under(self, lease: str) -> list[Row]:
        """The rows under a lease."""
        held = self._leases.get(lease)
        return [self._rows[key] for key in held.keys] if held else []

    def revision_of(self, stamp: str) -> int | None:
        """The revision that a request made when it first came, None if it has made none.

        A client that lost its connection repeats unanswered requests; without this, a
        compare-and-set that was done would report failure.
        """
        return self._history.revision_of(stamp)

    # Writing

    def put(
        self,
        key: str,
        text: str,
        *,
        expected: int | None = None,
        lease: str | None = None,
        beside: Mapping[str, str] | None = None,
        provided: tuple[str, int] | None = None,
        stamp: str = "",
    ) -> list[Row]:
        """Set a key, and others beside it. With `expected`, only if its last change was at that
        revision (0: it is absent); with `provided`, only if that key exists and last changed at
        that revision.

        Returns the changes, the key's own last; none if a condition does not hold. Raises
        `LeaseExpired` if its lease has ended.
        """
        if lease is not None and lease not in self._leases:
            raise LeaseExpired(f"The lease expired: '{key}' was not written.")
        if expected is not None and expected != self._modified(key):
            return []
        if provided is not None and not self.is_unchanged(*provided):
            return []
        others = [self._set(other, value, lease, "") for other, value in (beside or {}).items()]
        return [*others, self._set(key, text, lease, stamp)]

    def _modified(self, key: str) -> int:
        row = self._rows.get(key)
        return row.modified if row else 0

    def is_unchanged(self, key: str, modified: int) -> bool:
        """Return whether a key exists and last changed at this revision."""
        row = self._rows.get(key)
        return row is not None and row.modified == modified

    def _set(self, key: str, text: str, lease: str | None, stamp: str) -> Row:
        old = self._rows.get(key)
        self.revision += 1
        row = Row(key, text, old.created if old else self.revision, self.revision)
        self._rows[key] = row
        if old is None:
            insort(self._keys, key)
        self._tombstones.pop(key, None)
        self._own(key, lease)
        self._history.append(row, stamp)
        return row

    def _own(self, key: str, lease: str | None) -> None:
        """Move a key under a lease, or out of any."""
        before = self._owners.pop(key, None)
        if before is not None and before != lease:
            del self._leases[before].keys[key]
        if lease is not None:
            self._owners[key] = lease
            self._leases[lease].keys[key] = None

    def _delete(self, key: str) -> Row:
        self.revision += 1
        row = Row(key, None, self._rows.pop(key).created, self.revision)
        del self._keys[bisect_left(self._keys, key)]
        self._owners.pop(key, None)
        self._tombstones[key] = row
        if len(self._tombstones) > self._max_tombstones:
            oldest = next(iter(self._tombstones))
            self._tombstones_floor = self._tombstones.pop(oldest).modified
        self._history.append(row, "")
        return row

    # Leases

    def open_lease(self, token: str, seconds: float, now: float) -> None:
        """Open a lease, or renew it if it is open: the request may be repeated."""
        lease = self._leases.setdefault(token, Lease(seconds, now + seconds, math.inf))
        lease.seconds = seconds
        lease.deadline = now + seconds
        self._queue(lease, token)

    def seconds_of(self, token: str) -> float | None:
        """The duration of a lease; None if it is not open."""
        lease = self._leases.get(token)
        return None if lease is None else lease.seconds

    def keep_alive(self, token: str, now: float) -> bool:
        """Renew a lease; False if it has ended.

        A lease ends when `expire` ends it, not at its deadline: after a freeze of the host itself,
        waiting keep-alives are read before any client is dropped.
        """
        lease = self._leases.get(token)
        if lease is None:
            return False
        lease.deadline = now + lease.seconds
        return True

    def shorten(self, token: str, deadline: float) -> None:
        """Let a lease end at `deadline` unless it is kept alive before."""
        lease = self._leases.get(token)
        if lease is not None and deadline < lease.deadline:
            lease.deadline = deadline
            self._queue(lease, token)

    def _queue(self, lease: Lease, token: str) -> None:
        if lease.deadline < lease.queued:
            lease.queued = lease.deadline
            heapq.heappush(self._deadlines, (lease.deadline, token))

    def end_lease(self, token: str) -> list[Row]:
        """End a lease; returns the deletions of its keys."""
        lease = self._leases.pop(token, None)
        return [self._delete(key) for key in lease.keys] if lease else []

    def expire(self, now: float) -> dict[str, list[Row]]:
        """End every lease whose time is up; returns their tokens and their keys' deletions."""
        ended = {}
        while (due := self.next_deadline()) is not None and due <= now:
            token = self._deadlines[0][1]
            ended[token] = self.end_lease(token)
        return ended

    def next_deadline(self) -> float | None:
        """The time when the next lease may end, None if there is none.

        A keep-alive does not move its lease in the heap. This is done here when the old deadline
        has become the earliest: once per lease time, not at every keep-alive.
        """
        while self._deadlines:
            deadline, token = self._deadlines[0]
            lease = self._leases.get(token)
            if lease is None or lease.queued != deadline:
                heapq.heappop(self._deadlines)
            elif lease.deadline <= deadline:
                return deadline
            else:
                lease.queued = lease.deadline
                heapq.heapreplace(self._deadlines, (lease.deadline, token))
        return None

    # As JSON

    def to_json(self) -> dict[str, Any]:
        """The state that outlives the process; for leases their duration, not their end."""
        return {
            "revision": self.revision,
            "rows": [*self._rows.values()],
            "leases": [[token, it.seconds, [*it.keys]] for token, it in self._leases.items()],
            "tombstones": [*self._tombstones.values()],
            "tombstones_floor": self._tombstones_floor,
        }

    def load(self, data: Mapping[str, Any], now: float) -> None:
        """Load the result of `to_json` into an empty table; every lease starts again.

        The history is not kept: a client that is up to date continues, others get the last change
        of each key.
        """
        assert self.revision == 0, "the table is in use"
        self.revision = self._history.floor = data["revision"]
        self._rows = {row.key: row for row in (Row(*item) for item in data["rows"])}
        self._keys = sorted(self._rows)
        self._tombstones = {row.key: row for row in (Row(*item) for item in data["tombstones"])}
        self._tombstones_floor = data["tombstones_floor"]
        for token, seconds, keys in data["leases"]:
            self.open_lease(token, seconds, now)
            for key in keys:
                self._own(key, token)
