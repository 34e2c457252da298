"""The view of a running job, kept up to date from its growing logs."""

from __future__ import annotations

import copy
import time
from collections import deque

from torchelastic.events import types as events
from torchelastic.events.analysis import view
from torchelastic.events.analysis.find_job import JobLogs
from torchelastic.events.analysis.follow import Follower
from torchelastic.events.analysis.view import JobFold, JobView
from torchelastic.events.record import Record

#: Lines of several agents arrive out of order; records this many seconds old are in order.
_IN_ORDER_AFTER = 5.0
#: The number of last events to show.
_LATEST = 50
#: Event types that are too frequent to show.
_FREQUENT = ("progress",)


#: New lines this many seconds older than what is folded are from nodes whose events were missing
#: here: the leader has changed. Then all logs are read again, but only this often, in seconds.
_LATE, _READ_AGAIN = 30.0, 10.0


class _Heard:
    """The last record seen of each agent, in any file: an agent's lines come in order."""

    def __init__(self) -> None:
        #: By agent: the time of the last line, and the types of those with that time.
        self._upto: dict[str, tuple[float, frozenset[str]]] = {}

    def note(self, record: Record) -> bool:
        """Note a record; return True if it is new."""
        mono, types = self._upto.get(record.node, (float("-inf"), frozenset()))
        if record.mono < mono or (record.mono == mono and record.type in types):
            return False
        same = types if record.mono == mono else frozenset()
        self._upto[record.node] = (record.mono, same | {record.type})
        return True


class LiveView:
    """Reads only new lines at each look. `close` it."""

    def __init__(self, logs: JobLogs) -> None:
        self._logs = logs
        self._follower = Follower()
        self._begin()

    def _begin(self) -> None:
        """Read all logs from the start."""
        self._begun = time.monotonic()
        self._follower.close()
        self._follower = Follower()
        # Skip to the ends first: lines written meanwhile come twice, and are recognized.
        self._follower.skip(self._logs.files())
        records = self._logs.records(thin=True)
        self._job = records[0].job if records else self._logs.job
        self._heard = _Heard()
        for record in sorted(records, key=lambda record: record.mono):
            self._heard.note(record)
        #: Records old enough to be in order are folded; the rest waits to be sorted.
        self._fold = JobFold()
        self._folded = float("-inf")
        self._recent: list[Record] = []
        self._in_order: deque[Record] = deque(maxlen=_LATEST)
        #: The names of nodes by the ids of their agents.
        self._names: dict[str, str] = {}
        #: By node: from its clock to that of the merged log.
        self._shifts = {record.node: record.time - record.mono for record in records}
        self._late = False
        self._take(records)

    @property
    def alive(self) -> bool:
        return self._logs.alive

    def close(self) -> None:
        self._follower.close()

    def look(self, now: float | None = None) -> JobView:
        """Read what is new, and return the view."""
        self.read()
        return self.view(now)

    def read(self) -> bool:
        """Read what is new; return True if there is anything."""
        self._logs = self._logs.again()
        news = self._news()
        self._late |= any(record.time < self._folded - _LATE for record in news)
        if self._late and time.monotonic() - self._begun > _READ_AGAIN:
            self._begin()
        else:
            self._take(news)
        return bool(news)

    def view(self, now: float | None = None) -> JobView:
        """Return the view of what has been read."""
        fold = copy.deepcopy(self._fold)
        for record in self._recent:
            fold.feed(record)
        alive = self._logs.alive
        seen = fold.view(now=(time.time() if now is None else now) if alive else None)
        entry = self._logs.entry
        dead = {agent.node for agent in entry.agents if not agent.alive} if entry else set()
        return view.without(seen, dead)

    def latest(self) -> list[tuple[str, Record]]:
        """Return the last events, the oldest first, with the names of their nodes."""
        records = [*self._in_order, *(one for one in self._recent if one.type not in _FREQUENT)]
        return [(self._names.get(one.node, one.node), one) for one in records[-_LATEST:]]

    def _news(self) -> list[Record]:
        found: list[Record] = []
        for _, line in self._follower.new_lines(self._logs.files()):
            record = Record.parse(line)
            if record is None or self._job not in (None, record.job):
                continue
            if self._heard.note(record):
                found.append(self._on_one_clock(record))
        return found

    def _on_one_clock(self, record: Record) -> Record:
        """Shift a record to the common clock."""
        if record.heard is not None and record.node not in self._shifts:
            self._shifts[record.node] = record.heard - record.mono
        shift = self._shifts.get(record.node, 0.0)
        return record.heard_at(record.mono + shift) if shift else record

    def _take(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record.event, events.Joined):
                self._names[record.node] = record.event.name
        self._recent = sorted([*self._recent, *records], key=lambda record: record.time)
        newest = self._recent[-1].time if self._recent else 0.0
        count = sum(record.time <= newest - _IN_ORDER_AFTER for record in self._recent)
        for record in self._recent[:count]:
            self._folded = max(self._folded, record.time)
            self._fold.feed(record)
            if record.type not in _FREQUENT:
                self._in_order.append(record)
        del self._recent[:count]
