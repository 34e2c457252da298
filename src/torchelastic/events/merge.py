"""Merge several logs of a job into one. Pure.

The leader's log has the records of all agents on its clock. There may be several: the leader
changes, and an agent's last lines may not have reached a leader that was being killed. So all logs
are shifted to the clock of the first, by records that two logs share or, without any, by the
machines' wall clocks, which is exact enough for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median

from torchelastic.events.record import Record

#: Logs whose boot times differ by less than this are taken to be of one machine.
_SAME_MACHINE = 1.0
#: Shared records that are compared to find how two clocks differ.
_COMPARED_LIMIT = 201

Log = Sequence[Record]
Key = tuple[str, float, str]


def merged(logs: Iterable[Log]) -> list[Record]:
    """Return every record once, in the order of time on one clock."""
    known: dict[Key, Record] = {}
    records: list[Record] = []
    for log in _collected_first(log for log in logs if log):
        shifts = _shifts(log, known)
        new = [one for one in log if one.key not in known]
        added = [_shifted(record, shifts[record.node]) for record in new]
        known.update((record.key, record) for record in added)
        records += added
    # Sorting is stable: what one agent wrote within a microsecond stays in its order.
    return sorted(records, key=lambda record: record.time)


def last_run(logs: Iterable[Log]) -> list[Log]:
    """Return the logs of a job's last run; a run starts after all earlier logs ended."""
    run: list[Log] = []
    for records in sorted((log for log in logs if log), key=lambda log: log[0].wall):
        if all(other[-1].wall < records[0].wall for other in run):
            run = []
        run.append(records)
    return run


def _collected_first(logs: Iterable[Log]) -> list[Log]:
    """Sort leaders' logs before agents' own, each kind by start."""

    def rank(log: Log) -> tuple[bool, float, str]:
        own = all(record.heard is None for record in log)
        return own, log[0].wall, log[0].node

    return sorted(logs, key=rank)


def _shifts(records: Log, known: dict[Key, Record]) -> dict[str, float]:
    """Return the shift of each node's times onto the clock of the known records.

    All records of a leader's log are on one clock already: they share one shift.
    """
    nodes = dict.fromkeys(record.node for record in records)
    if not known:
        return dict.fromkeys(nodes, 0.0)
    if any(record.heard is not None for record in records):
        return dict.fromkeys(nodes, _shift(records, known))
    return {node: _shift([one for one in records if one.node == node], known) for node in nodes}


def _shift(records: Log, known: dict[Key, Record]) -> float:
    shared = [(record, known[record.key]) for record in records if record.key in known]
    if shared:
        return median(other.time - record.time for record, other in shared[:_COMPARED_LIMIT])
    own = [other for other in known.values() if other.node == records[0].node]
    if own and records[0].heard is None:
        return median(other.time - other.mono for other in own[:_COMPARED_LIMIT])
    here = median(record.wall - record.time for record in records[:_COMPARED_LIMIT])
    there = median(record.wall - record.time for record in islice(known.values(), _COMPARED_LIMIT))
    return 0.0 if abs(here - there) < _SAME_MACHINE else here - there


def _shifted(record: Record, shift: float) -> Record:
    return record if shift == 0.0 else record.heard_at(record.time + shift)
