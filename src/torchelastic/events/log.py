"""The event log files: one JSON object per line, each written immediately.

    events.jsonl    the events of one agent
    job.jsonl       on the leader, in addition: the events of all agents that have reached it

`record` defines a line; `merge` combines several files.
"""

from __future__ import annotations

import logging
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torchelastic.clock import Clock
from torchelastic.errors import ConfigError
from torchelastic.events.merge import last_run, merged
from torchelastic.events.record import Record
from torchelastic.events.rotation import AppendFile, Rotation, length, opened
from torchelastic.events.types import Event, Note

log = logging.getLogger(__name__)

#: A log that grows beyond this is rotated to `events.jsonl.1`.
MAX_BYTES = 16 * 1024 * 1024
#: Seconds to finish a rotation when the agent ends.
ROTATION_TIMEOUT = 10.0

EVENTS_FILE = "events.jsonl"
#: The leader's log of all agents.
COLLECTED_FILE = "job.jsonl"
#: Up to this many bytes of logs, every step is read for a view; of longer logs, only these last
#: bytes and a sample.
READ_ALL_LIMIT, _LATEST = 16 * 1024 * 1024, 256 * 1024
#: The beginning of a line with steps.
_PROGRESS = b'{"v":1,"type":"progress"'

Sink = Callable[[str], None]
Listener = Callable[[Record], None]


class EventLog:
    """Appends events to a file. A full disk costs events, never the job."""

    def __init__(
        self,
        path: Path,
        *,
        job: str,
        node: str,
        clock: Clock,
        sink: Sink | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = path
        #: Events that could not be written: all of them, and those since the last that could.
        self.dropped = 0
        self._missing = 0
        self._job = job
        self._node = node
        self._clock = clock
        self._sink = sink
        self._listeners: list[Listener] = []
        self._max_bytes = max_bytes
        self._file = AppendFile(path)
        self._rotation = Rotation(path, max_bytes // 4)

    def listen(self, listener: Listener) -> None:
        """Pass every record to the listener before it is written. The listener must not block."""
        self._listeners.append(listener)

    def emit(self, event: Event, *, generation: int | None = None) -> None:
        """Write an event of this agent."""
        self.append(
            Record(
                type=event.type,
                job=self._job,
                node=self._node,
                wall=round(time.time(), 6),
                mono=round(self._clock.now(), 6),
                generation=generation,
                event=event,
            )
        )

    def append(self, record: Record) -> None:
        """Write a record of any agent."""
        for listener in tuple(self._listeners):
            self._hand_on(listener, record)
        try:
            text = record.line()
            if self._sink is not None:
                self._sink(text)
            self._append(text.encode() + b"\n")
        except Exception as error:  # also a bug of ours in what is written
            self._lose(error)
        else:
            self._note_what_is_missing()

    def _lose(self, error: Exception) -> None:
        self.dropped += 1
        self._missing += 1
        if self.dropped == 1:  # a disk that is full for a week is logged once
            log.warning("Events are lost: %s cannot be written (%s).", self.path, error)

    def _note_what_is_missing(self) -> None:
        """Note the gap once there is room again: readers must not take the log for complete."""
        if self._missing:
            lost, self._missing = self._missing, 0
            self.emit(Note(text=f"events lost before this, not written: {lost}"))

    def _hand_on(self, listener: Listener, record: Record) -> None:
        try:
            listener(record)
        except Exception:  # a bug in a listener must not end the job
            self._listeners.remove(listener)
            log.exception("A listener for events failed; it gets no more events.")

    def close(self) -> None:
        self._file.close()
        self._rotation.wait(ROTATION_TIMEOUT)

    def _append(self, line: bytes) -> None:
        self._file.append(line)
        if self._file.size > self._max_bytes and not self._rotation.is_at_work:
            self._file.close()
            self._rotation.begin()


def read(path: Path, *, steps: bool = True, every: int = 1) -> Iterator[Record]:
    """Yield the records of a log in order, rotated parts first. Invalid lines are skipped.

    Without `steps`, `progress` is skipped, which is most of a long log; with `every`, only about
    one `progress` line in `every` is read, and all of the latest.
    """
    with opened(path) as files:
        for lines in files:
            left = _length(os.fstat(lines.fileno()))
            while left > 0 and (line := lines.readline()):
                left -= len(line)
                if line.startswith(_PROGRESS) and not _is_read(line, steps, every, left):
                    continue
                if record := Record.parse(line):
                    yield record


def _length(file: os.stat_result) -> float:
    """Return how much to read: not what is written meanwhile, and nothing of a device, which the
    log may be a link to."""
    return float("inf") if stat.S_ISFIFO(file.st_mode) else file.st_size


def _is_read(line: bytes, steps: bool, every: int, left: float) -> bool:
    """Sample by content: the lines of many nodes alternate, and counting would pick one node."""
    return steps and (every == 1 or left < _LATEST or zlib.crc32(line) % every == 0)


def read_job(where: Path, *, job: str | None = None, thin: bool = False) -> Iterator[Record]:
    """Yield the events of a job in a file or directory, in the order of `Record.time`.

    `where` is a log file, a run directory, or a log directory with the run directories of several
    nodes. Raises `ConfigError` if it holds no events, or those of several jobs and none is named.
    `thin` as in `read_files`.
    """
    files = find_logs(where)
    every = _one_in(files) if thin else 1
    records = [list(read(file, every=every)) for file in files]
    jobs = sorted({record.job for found in records for record in found[:1]})
    if job is None and len(jobs) > 1:
        listed = ", ".join(repr(name) for name in jobs)
        raise ConfigError(f"{where} has events of several jobs: choose one of {listed}.")
    wanted = [found for found in records if found and job in (None, found[0].job)]
    if not wanted:
        of = f" of job '{job}'" if job is not None else ""
        raise ConfigError(f"{where} has no events{of}: use the --log-dir of a run.")
    yield from merged(last_run(wanted))


def read_files(files: Iterable[Path], *, steps: bool = True, thin: bool = False) -> list[Record]:
    """Return the merged events of these logs of one run of one job.

    With `thin`, for a view: not every step of logs that would take minutes to read.
    """
    files = list(files)
    every = _one_in(files) if thin else 1
    return merged([list(read(file, steps=steps, every=every)) for file in files])


def _one_in(files: Iterable[Path]) -> int:
    """Return N, if one in N lines with steps is to be read of logs as long as these."""
    return 1 + sum(map(length, files)) // READ_ALL_LIMIT


def find_logs(where: Path) -> list[Path]:
    """Return the event logs at a path: the file itself, or those of its run directories."""
    if not where.is_dir():
        return [where]
    names = (COLLECTED_FILE, EVENTS_FILE)
    return [path for name in names for deep in ("", "*/") for path in where.glob(deep + name)]
