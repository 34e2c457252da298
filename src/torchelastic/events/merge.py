"""One story out of several logs of a job. Pure.

A gathered log has all agents' records on one clock, its leader's. It may not be alone: the lead
changes hands, and an agent's last lines may not have reached a leader that was being killed. So
all logs are laid on the clock of the first: by records that two of them share and, where there
are none, by the machines' wall clocks: for people, good enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median

from torchelastic.events.record import Record

#: Machines whose clocks differ by less, counted from when they were booted, are taken for one.
_SAME_MACHINE = 1.0
#: Shared records that are looked at to find out how two clocks differ.
_ENOUGH = 201

Log = Sequence[Record]
Key = tuple[str, float, str]


def merged(logs: Iterable[Log]) -> list[Record]:
    """Every record once, in the order of its time on one clock."""
    told: dict[Key, Record] = {}
    story: list[Record] = []
    for records in _gathered_first(log for log in logs if log):
        shifts = _shifts(records, told)
        new = [one for one in records if one.key not in told]
        added = [_shifted(record, shifts[record.node]) for record in new]
        told.update((record.key, record) for record in added)
        story += added
    # Sorting is stable: what one agent wrote within a microsecond stays in the order it was told.
    return sorted(story, key=lambda record: record.time)


def last_run(logs: Iterable[Log]) -> list[Log]:
    """The logs of a job's last run: a run begins when all earlier logs had ended."""
    run: list[Log] = []
    for records in sorted((log for log in logs if log), key=lambda log: log[0].wall):
        if all(other[-1].wall < records[0].wall for other in run):
            run = []
        run.append(records)
    return run


def _gathered_first(logs: Iterable[Log]) -> list[Log]:
    """Gathered logs before agents' own, each kind in the order in which they began."""

    def rank(log: Log) -> tuple[bool, float, str]:
        own = all(record.heard is None for record in log)
        return own, log[0].wall, log[0].node

    return sorted(logs, key=rank)


def _shifts(records: Log, told: dict[Key, Record]) -> dict[str, float]:
    """By node: what to add to the times of its records here to be on the clock of those told.

    All records of a gathered log are on one clock already: one shift is right for all of them.
    """
    nodes = dict.fromkeys(record.node for record in records)
    if not told:
        return dict.fromkeys(nodes, 0.0)
    if any(record.heard is not None for record in records):
        return dict.fromkeys(nodes, _shift(records, told))
    return {node: _shift([one for one in records if one.node == node], told) for node in nodes}


def _shift(records: Log, told: dict[Key, Record]) -> float:
    shared = [(record, told[record.key]) for record in records if record.key in told]
    if shared:
        return median(other.time - record.time for record, other in shared[:_ENOUGH])
    own = [other for other in told.values() if other.node == records[0].node]
    if own and records[0].heard is None:
        return median(other.time - other.mono for other in own[:_ENOUGH])
    here = median(record.wall - record.time for record in records[:_ENOUGH])
    there = median(record.wall - record.time for record in islice(told.values(), _ENOUGH))
    return 0.0 if abs(here - there) < _SAME_MACHINE else here - there


def _shifted(record: Record, shift: float) -> Record:
    return record if shift == 0.0 else record.heard_at(record.time + shift)
