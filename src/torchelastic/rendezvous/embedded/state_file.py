"""The file in which a store or a voter keeps its state: rewritten from time to time, appended
otherwise.

It has the tables of the jobs, then every change. An entry is a list in JSON, and its first item
names its kind:

    ["job", JOB, NAME, TABLE]                       a job as it was when the file was written
    ["new", JOB, NAME]                              a job that came later, its table empty
    ["put", JOB, KEY, TEXT, LEASE, BESIDE, STAMP]   as `Table.put` did it
    ["open", JOB, TOKEN, SECONDS]                   a lease
    ["end", JOB, TOKEN]                             the end of one
    ["forget", JOB]

Keep-alives are not written: after a restart every lease has its whole time again, and living
clients come back within it. Changes are written as operations: replayed in the same order, they
give the same revisions, so that clients notice no difference.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.transport.frames import Row

FORMAT = "torchelastic-rendezvous-state"
VERSION = 1

Entry = list[Any]
#: Writes an entry; True: it must be on disk before any client learns of it.
Recorder = Callable[[Entry, bool], None]


class RecordedTable(Table):
    """A table that records its changes, once `record` is set."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self._job = job
        self.record: Recorder | None = None

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
        rows = super().put(
            key,
            text,
            expected=expected,
            lease=lease,
            beside=beside,
            provided=provided,
            stamp=stamp,
        )
        if rows:
            entry = ["put", self._job, key, text, lease, dict(beside or {}), stamp]
            # Keys without a lease outlive all nodes: the world, its generation, the budget.
            self._write(entry, lasting=lease is None)
        return rows

    def open_lease(self, token: str, seconds: float, now: float) -> None:
        before = self.seconds_of(token)
        super().open_lease(token, seconds, now)
        if before != seconds:
            self._write(["open", self._job, token, seconds])

    def end_lease(self, token: str) -> list[Row]:
        before = self.seconds_of(token)
        rows = super().end_lease(token)
        if before is not None:
            self._write(["end", self._job, token])
        return rows

    def _write(self, entry: Entry, *, lasting: bool = False) -> None:
        if self.record is not None:
            self.record(entry, lasting)


@dataclass
class KeptJob:
    """A job in the file."""

    #: The name of its store, for clients that come back.
    name: str
    table: RecordedTable


def snapshot(jobs: Mapping[str, KeptJob]) -> list[Entry]:
    """The entries that describe the current state."""
    return [["job", job, kept.name, kept.table.to_json()] for job, kept in jobs.items()]


def replay(entries: Iterable[Entry], now: float) -> dict[str, KeptJob]:
    """The jobs that the entries describe."""
    jobs: dict[str, KeptJob] = {}
    for entry in entries:
        match entry:
            case ["job", job, name, table]:
                jobs[job] = KeptJob(name, RecordedTable(job))
                jobs[job].table.load(table, now)
            case ["new", job, name]:
                jobs[job] = KeptJob(name, RecordedTable(job))
            case ["put", job, key, text, lease, beside, stamp]:
                jobs[job].table.put(key, text, lease=lease, beside=beside, stamp=stamp)
            case ["open", job, token, seconds]:
                jobs[job].table.open_lease(token, seconds, now)
            case ["end", job, token]:
                jobs[job].table.end_lease(token)
            case ["forget", job]:
                del jobs[job]
            case _:
                raise ValueError(f"unknown entry: {entry}")
    return jobs


# --- lines ---------------------------------------------------------------------------------------


def line(content: Entry) -> bytes:
    """One line of the file: its checksum and its content."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def heading() -> bytes:
    """The first line."""
    return line([FORMAT, VERSION])


def parse(data: bytes, path: str) -> list[Entry]:
    """The entries of a file. Raises `ConfigError` for a foreign or damaged file.

    A last line without a newline was being written when the process died; no client was told of it.
    """
    lines = data.split(b"\n")[:-1]
    head = _content(lines[0]) if lines else None
    if head is None or head[:1] != [FORMAT]:
        raise ConfigError(
            f"{path} is not a rendezvous state file: name another one in --state-file."
        )
    if head != [FORMAT, VERSION]:
        raise ConfigError(
            f"{path} was written by another version of torchelastic: use that version, or name "
            "another file in --state-file."
        )
    entries = []
    for number, text in enumerate(lines[1:], start=2):
        entry = _content(text)
        if entry is None:
            raise ConfigError(damaged(path, f"line {number} has a wrong checksum"))
        entries.append(entry)
    return entries


def damaged(path: str, how: str) -> str:
    """The error message for a damaged state file."""
    return (
        f"The state file {path} is damaged ({how}): restore it from a copy, or remove it and "
        "restart its jobs from the beginning."
    )


def _content(text: bytes) -> Entry | None:
    """The content of a line; None if its checksum is wrong."""
    total, _, rest = text.partition(b" ")
    try:
        if int(total, 16) != zlib.crc32(rest):
            return None
        content = json.loads(rest)
    except ValueError:
        return None
    return content if isinstance(content, list) else None


#: The file is rewritten when its changes exceed this many bytes, and this many times its size after
#: the last rewrite.
REWRITE_BYTES, REWRITE_FACTOR = 1024 * 1024, 4


class StateFile:
    """One open state file, locked by this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        #: Its size in bytes after the last rewrite, and now.
        self._whole = self._size = 0

    def read(self) -> list[Entry]:
        """Lock the file for this process and return its entries; none if there is no file."""
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(self._unusable(error)) from None
        self._lock(self._descriptor)
        if not self._is_current():
            raise ConfigError(self._in_use())
        with open(self._descriptor, "rb", closefd=False) as file:
            return parse(file.read(), self.path)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(self._in_use()) from None

    def _is_current(self) -> bool:
        """Return whether this is still the file at the path: another process may have rewritten
        it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _in_use(self) -> str:
        return (
            f"The state file {self.path} is in use by another process: give every server a "
            "different file."
        )

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Rewrite the file: after a crash there is either the old or the new one."""
        lines = [heading(), *map(line, entries)]
        temporary = f"{self.path}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            # It has the leases' tokens, with which another process could pass for a node.
            descriptor = os.open(temporary, flags, 0o600)
        except OSError as error:
            raise ConfigError(self._unusable(error)) from None
        try:
            self._lock(descriptor)  # before others can find it by its name
            _write(descriptor, b"".join(lines))
            os.fsync(descriptor)
            os.rename(temporary, self.path)
            sync_directory(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor = descriptor
        self._whole = self._size = sum(map(len, lines))

    def append(self, entry: Entry, *, lasting: bool) -> None:
        """Append one change; a `lasting` one survives the machine, others survive this process."""
        data = line(entry)
        _write(self._descriptor, data)
        self._size += len(data)
        if lasting:
            os.fdatasync(self._descriptor)

    @property
    def is_long(self) -> bool:
        """Return whether it is time to rewrite the file."""
        return self._size - self._whole > max(REWRITE_BYTES, REWRITE_FACTOR * self._whole)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _unusable(self, error: OSError) -> str:
        return (
            f"The state file {self.path} cannot be used ({error.strerror}): name another one in "
            "--state-file."
        )


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes: a nearly full disk accepts only some at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: str) -> None:
    """Sync the directory: only then is a new file name on disk."""
    directory = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
