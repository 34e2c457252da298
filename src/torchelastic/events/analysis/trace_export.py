"""Export a job as a trace in Chrome's JSON format, for Perfetto. Pure.

    the job           a track of generations, one of recoveries with their parts
    a node each       a track per rank: its steps, its failures

A step is drawn from when it was entered until the next one was; if steps were faster than they were
sampled, several share a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any, Literal

from torchelastic.events import types as events
from torchelastic.events.analysis.recoveries import Recovery
from torchelastic.events.analysis.view import JobFold
from torchelastic.events.record import Record
from torchelastic.events.timeline import Generation
from torchelastic.events.words import first_line, sentence

Entry = dict[str, Any]

#: The tracks of the job; those of nodes follow.
_JOB = 1
_GENERATIONS, _RECOVERIES = 1, 2

#: Events drawn as moments on the track of the node that wrote them.
_MOMENTS = (
    events.NodeLost,
    events.NodeJoined,
    events.NodeLeaving,
    events.LeaseLost,
    events.SignalReceived,
    events.Straggler,
    events.JobEnded,
    events.BecameLeader,
)


def trace(records: Iterable[Record]) -> Iterator[Entry]:
    """Yield the entries of a trace from records in the order of time."""
    made = _Trace()
    for record in records:
        yield from made.feed(record)
    yield from made.rest()


@dataclass
class _Track:
    """A rank on a node: the last step it entered, and when."""

    node: int
    rank: int
    generation: int = -1
    step: int = -1
    at: float = 0.0


@dataclass
class _Trace:
    zero: float | None = None
    now: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    tracks: dict[tuple[int, int], _Track] = field(default_factory=dict)
    fold: JobFold = field(default_factory=JobFold)
    #: All generations by number; the timeline keeps only the last ones.
    generations: dict[int, Generation] = field(default_factory=dict)

    def feed(self, record: Record) -> Iterator[Entry]:
        if self.zero is None:
            self.zero = record.time
            yield from _named("process", _JOB, 0, f"job {record.job}")
            yield from _named("thread", _JOB, _GENERATIONS, "generations")
            yield from _named("thread", _JOB, _RECOVERIES, "recoveries")
        self.now = max(self.now, record.time)
        self.fold.feed(record)
        if self.fold.timeline.began:
            current = self.fold.timeline.current
            self.generations[current.number] = current
        yield from self._node(record)
        yield from self._take(record)

    def rest(self) -> Iterator[Entry]:
        """Yield what was unfinished at the last record, and what is known only then."""
        for node, number in self.nodes.items():
            if node not in self.named:  # it was never named; use the id of its agent
                yield from _named("process", number, 0, f"node {node}")
        yield from map(self._generation, self.generations.values())
        for track in self.tracks.values():
            yield from self._step(track, track.step + 1, self.now)
        known = self.fold.view().recoveries
        for recovery, following in zip_longest(known, known[1:]):
            # Bars of one track must not overlap, but a failure may come during a recovery.
            limit = self._cause(following) if following is not None else inf
            yield from self._recovery(recovery, limit)

    # --- who -------------------------------------------------------------------------------------

    def _node(self, record: Record) -> Iterator[Entry]:
        number = self.nodes.setdefault(record.node, _JOB + 1 + len(self.nodes))
        if isinstance(record.event, events.Joined):
            self.named.add(record.node)
            yield from _named("process", number, 0, f"node {record.event.name}")

    def _track(self, record: Record, rank: int) -> Iterator[Entry]:
        """Start the track of a rank, if it is new or of another generation."""
        key = (self.nodes[record.node], rank)
        generation = record.generation if record.generation is not None else -1
        track = self.tracks.get(key)
        if track is None:
            self.tracks[key] = track = _Track(*key)
            yield from _named("thread", key[0], _tid(rank), f"rank {rank}")
        if generation > track.generation:
            track.generation, track.step = generation, -1

    # --- what ------------------------------------------------------------------------------------

    def _take(self, record: Record) -> Iterator[Entry]:
        match record.event:
            case events.Training(rank=rank, step=step):
                yield from self._track(record, rank)
                yield from self._entered(record, rank, step, record.time)
            case events.Progress() as progress:
                yield from self._progress(record, progress)
            case events.WorkerFailed(failure=failure):
                failed = failure.get("rank")
                if isinstance(failed, int) and failed >= 0:
                    yield from self._track(record, failed)
                    yield self._moment(record, "failure", _tid(failed), failure)
            case events.WorkersStarted(ranks=ranks):
                for rank in ranks:
                    yield from self._track(record, rank)
        if isinstance(record.event, _MOMENTS):
            yield self._moment(record, record.type, 0, record.event.fields())

    def _generation(self, one: Generation) -> Entry:
        world = one.world
        args: Entry = {"nodes": list(world.nodes), "size": world.size, "reason": world.reason}
        if one.over is not None:
            args["ended by"] = one.kind
        end = self._end(one.number, self.now)
        return self._bar(f"generation {one.number}", one.formed, end, _JOB, _GENERATIONS, args)

    def _end(self, generation: int, else_: float) -> float:
        """Return when a generation ended, where its recovery is drawn."""
        known = self.generations.get(generation)
        return else_ if known is None or known.ended is None else known.ended

    def _progress(self, record: Record, progress: events.Progress) -> Iterator[Entry]:
        shift = record.time - record.mono
        for rank, step, at in zip(progress.ranks, progress.steps, progress.at, strict=False):
            if rank >= 0:
                yield from self._track(record, rank)
                yield from self._entered(record, rank, step, at + shift)

    def _entered(self, record: Record, rank: int, step: int, at: float) -> Iterator[Entry]:
        track = self.tracks[(self.nodes[record.node], rank)]
        if record.generation == track.generation and step > track.step:
            yield from self._step(track, step, at)
            track.step, track.at = step, at

    def _step(self, track: _Track, until: int, at: float) -> Iterator[Entry]:
        """Yield the bar of the steps since the one that a rank entered last."""
        at = min(at, self._end(track.generation, at))
        if track.step < 0 or at <= track.at:
            return
        last = until - 1
        name = f"step {last}" if last == track.step else f"steps {track.step} to {last}"
        args = {"generation": track.generation, "steps": until - track.step}
        yield self._bar(name, track.at, at, track.node, _tid(track.rank), args)

    def _cause(self, recovery: Recovery) -> float:
        """Return the time of the cause of a recovery."""
        return self._end(recovery.generation, self.now) - recovery.detect

    def _recovery(self, recovery: Recovery, limit: float) -> Iterator[Entry]:
        parts = {
            "detect": recovery.detect,
            "wait": recovery.wait,
            "agree": recovery.agree or 0.0,
            "rebuild": recovery.rebuild or 0.0,
            "transfer": recovery.transfer or 0.0,
            "redo": recovery.redo or 0.0,
        }
        at = self._cause(recovery)
        name = f"{recovery.kind}: {first_line(recovery.why)}"
        end = min(at + recovery.cost, limit)
        yield self._bar(name, at, end, _JOB, _RECOVERIES, parts)
        for part, spent in parts.items():
            if spent > 0 and at < end:
                yield self._bar(part, at, min(at + spent, end), _JOB, _RECOVERIES, {})
                at += spent

    # --- entries ---------------------------------------------------------------------------------

    def _micros(self, time: float) -> float:
        return round((time - (self.zero or 0.0)) * 1e6, 3)

    def _bar(self, name: str, begin: float, end: float, pid: int, tid: int, args: Entry) -> Entry:
        ts = self._micros(begin)
        dur = round(max(0.0, self._micros(end) - ts), 3)
        return _entry("X", name, pid, tid, ts=ts, dur=dur, args=args)

    def _moment(self, record: Record, name: str, tid: int, args: Any) -> Entry:
        pid = self.nodes[record.node]
        about = dict(args) | {"said": sentence(record)}
        ts = self._micros(record.time)
        return _entry("i", name, pid, tid, ts=ts, s="t" if tid else "p", args=about)


def _tid(rank: int) -> int:
    """Return the track of a rank; track 0 is the node's."""
    return rank + 1


def _entry(phase: str, name: str, pid: int, tid: int, **more: Any) -> Entry:
    return {"ph": phase, "name": name, "cat": "torchelastic", "pid": pid, "tid": tid, **more}


def _named(kind: Literal["process", "thread"], pid: int, tid: int, name: str) -> Iterator[Entry]:
    """Name a track or a group of tracks, sorted by its number."""
    order = pid if kind == "process" else tid
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": args}
