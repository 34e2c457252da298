"""Tee a worker's stream through the agent: to its log file, and line by line to the console."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import time
from pathlib import Path

from torchelastic.agent.output.output_stream import OutputStream

log = logging.getLogger(__name__)

#: Bytes read at once; longer lines are passed on in pieces.
CHUNK = 64 * 1024
#: More than any pipe holds (1 MiB, unless root has raised it).
_LAST_READS = 32
#: Seconds until a disk that was full is tried again.
TRY_AGAIN = 1.0
#: Bytes at which an implicit copy is rotated; the last file is kept.
COPY_LIMIT = 64 * 1024 * 1024
#: Bytes of the stream's end that are kept for failure reports.
TAIL = 16 * 1024
#: A warning of torch's distributed C++ code, and the beginnings of a C++ stack's lines below it.
_CPP_WARNING = re.compile(rb"\[W\d+ [\d:.]+ \S+:\d+\] \[c10d\] ")
_CPP_STACK = (b"Exception raised from ", b"frame #", b"<omitting python frames>")
#: Bytes of a line in which the two are looked for.
_HEAD = 512


class LineSplitter:
    """Cuts bytes into lines, at line feeds and carriage returns; whatever bytes they are.

    A progress bar that only ever returns the carriage is shown as one line per state.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, without their ends, and pieces of an overlong line."""
        whole = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        # A carriage return at the very end may be half of a line end.
        if whole and not whole[-1].endswith(b"\n"):
            self._rest = whole.pop()
        lines = [piece for line in whole for piece in _content(line)]
        while len(self._rest) > CHUNK:
            lines.append(self._rest[:CHUNK])
            self._rest = self._rest[CHUNK:]
        return lines

    def rest(self) -> list[bytes]:
        """The text after the last line end, once the stream has ended."""
        rest, self._rest = self._rest, b""
        return _content(rest) if rest else []


def _content(line: bytes) -> list[bytes]:
    text = line.rstrip(b"\r\n")
    if not text:
        return [] if line == b"\r" else [b""]
    return [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]


class CppStackFilter:
    """Removes the C++ stacks below warnings of torch, 20 to 30 lines whenever a store is lost.

    Everything else passes at once, byte by byte. Stacks of errors pass, too.
    """

    def __init__(self) -> None:
        #: The beginning of the line that has not ended yet.
        self._line = b""
        self._below_warning = self._in_stack = False

    def feed(self, data: bytes) -> bytes:
        """The part of `data` to show."""
        if not self._below_warning and b"[c10d]" not in self._line + data:  # usually
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._line = (data[end:] if end else self._line + data)[:_HEAD]
            return data
        return b"".join(map(self._shown, data.splitlines(keepends=True)))

    def _shown(self, piece: bytes) -> bytes:
        line = self._line + piece
        ended = piece.endswith((b"\n", b"\r"))
        self._line = b"" if ended else line[:_HEAD]
        if self._below_warning:
            if line.startswith(_CPP_STACK):
                self._in_stack = True
                return b""
            if not ended and any(start.startswith(line) for start in _CPP_STACK):
                return b""
            was_in_stack, self._below_warning, self._in_stack = self._in_stack, False, False
            # An empty line ends a stack.
            piece = b"" if was_in_stack and line == b"\n" else line
        self._below_warning = ended and _CPP_WARNING.search(line[:_HEAD]) is not None
        return piece

    def rest(self) -> bytes:
        """The withheld text after the last line end, once the stream has ended."""
        is_shown = not self._below_warning or self._line.startswith(_CPP_STACK)
        return b"" if is_shown else self._line


class Backlog:
    """A stream's log file, and the part of it that the console has not shown yet.

    A slow console costs neither memory nor the worker's time: the rest is read back from the file.
    Without a file (off, or the disk is full) the rest is kept in memory, and the stream is not read
    further while that is `full`.
    """

    def __init__(self, path: Path | None, limit: int | None = None) -> None:
        """`limit` is the size at which the file is rotated."""
        self._path = path
        self._limit = limit
        self._file: int | None = None
        self._written = self._shown = 0
        if path is not None:
            self._open(path)
        self._memory = b""
        #: Bytes missing in the file, and when to try to write again.
        self._missing = 0
        self._try_again = 0.0
        self._warned = False

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._written = self._shown = os.fstat(self._file).st_size

    def _rotate(self, path: Path) -> None:
        """Start a new file; keep the old one if that fails."""
        try:
            os.rename(path, f"{path}.1")
            self.close()
            self._open(path)
        except OSError as error:
            self._limit = None
            self._warn(error)

    def append(self, data: bytes, *, shown: bool) -> None:
        """Keep `data`; `shown` says that the console has it already."""
        kept = self._store(self._file, data) if self._file is not None else 0
        if shown:
            self._shown = self._written
            if self._path is not None and self._limit is not None and self._written > self._limit:
                self._rotate(self._path)
        else:
            self._memory += data[kept:]

    def take(self) -> bytes:
        """The next piece not shown yet; empty when there is none."""
        missed = min(CHUNK, self._written - self._shown)
        if missed and self._file is not None:
            data = os.pread(self._file, missed, self._shown)
            # The file was truncated: the rest cannot be shown.
            self._shown = self._shown + len(data) if data else self._written
            return data or self.take()
        data, self._memory = self._memory, b""
        return data

    @property
    def size(self) -> int:
        """Bytes not shown yet."""
        return self._written - self._shown + len(self._memory)

    @property
    def full(self) -> bool:
        return len(self._memory) >= CHUNK

    def forget(self) -> None:
        """Drop the part that has not been shown."""
        self._shown = self._written
        self._memory = b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _store(self, file: int, data: bytes) -> int:
        """Write to the file; return the bytes written. A full disk is retried now and then, but
        only when all in memory is shown: otherwise the console would show it out of order."""
        if self._missing and (self._memory or time.monotonic() < self._try_again):
            self._missing += len(data)
            return 0
        kept = 0
        try:
            self._note_what_is_missing(file)
            while kept < len(data):
                kept += os.write(file, data[kept:])
        except OSError as error:
            # A full disk must not end the job.
            self._try_again = time.monotonic() + TRY_AGAIN
            self._warn(error)
        self._missing += len(data) - kept
        self._written += kept
        return kept

    def _note_what_is_missing(self, file: int) -> None:
        if self._missing:
            note = b"\n(%d bytes are missing here: the disk was full.)\n" % self._missing
            if (written := os.write(file, note)) < len(note):
                self._written += written
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._written += written
            self._missing = 0

    def _warn(self, error: OSError) -> None:
        if not self._warned:  # a disk may be full for weeks
            self._warned = True
            log.warning("Worker output is missing in %s: %s.", self._path, error.strerror)


class LineFile:
    """A node's aggregated file: its workers' lines that match a filter."""

    def __init__(self, path: Path, needles: tuple[str, ...]) -> None:
        self._path = path
        self._needles = [os.fsencode(needle) for needle in needles]
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._users = 1
        self._writable = True

    def shared(self) -> LineFile:
        """This file for one more user, who closes it, too."""
        self._users += 1
        return self

    def offer(self, prefix: bytes, line: bytes) -> None:
        """Write the line if it matches."""
        if not self._writable or not any(needle in line for needle in self._needles):
            return
        try:
            os.write(self._file, prefix + line + b"\n")
        except OSError as error:
            self._writable = False
            log.warning("%s ends here: cannot write to it (%s).", self._path, error.strerror)

    def close(self) -> None:
        """Close the file when its last user has."""
        self._users -= 1
        if not self._users:
            os.close(self._file)


class Tee:
    """Reads one stream of one worker from a pipe until all writers have closed it.

    It closes what it has opened as soon as it is not needed: in `train`, workers come and go for as
    long as the job runs.
    """

    def __init__(
        self,
        *,
        prefix: str | None,
        path: Path | None,
        console: OutputStream,
        filtered: LineFile | None,
    ) -> None:
        """Without a prefix the console gets the bytes as they come."""
        self._prefix = None if prefix is None else os.fsencode(prefix)
        self._console = console
        self._filtered = filtered
        #: Only with a file, which has them.
        self._stacks = CppStackFilter() if path is not None else None
        self._shown_lines = LineSplitter()
        self._filtered_lines = LineSplitter()
        self._path = path
        self._waits_for_room = False
        self._ended = False
        self._tail = b""
        #: Set when the stream has ended and all of it is shown.
        self.finished = asyncio.Event()
        self._backlog = Backlog(path, COPY_LIMIT if prefix is None else None)
        try:
            self._read_end, self.write_end = os.pipe()
        except OSError:
            self._backlog.close()
            raise
        os.set_blocking(self._read_end, False)
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self._read_on()

    def close(self) -> None:
        """Read the rest of the pipe, show what the console takes now, and close."""
        self._take_in()
        self._end()
        if not self.finished.is_set():
            self._give_up_console()

    def tail(self) -> bytes:
        """The end of what the worker has written, up to now."""
        self._take_in()
        return self._tail

    def _take_in(self) -> None:
        for _ in range(_LAST_READS):  # bounded: a process may write forever
            if self._ended or not self._on_readable():
                break

    def _on_readable(self) -> bool:
        """Read once; False if there is nothing to read now, or no room for it."""
        if self._backlog.full:
            self._pause()
            return False
        try:
            data = os.read(self._read_end, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL:]
        direct = self._backlog.size == 0 and self._console.room
        self._backlog.append(data, shown=direct)
        if self._filtered is not None:
            self._write_filtered(self._filtered_lines.feed(data))
        if direct:
            self._pass_on(data)
        else:
            self._catch_up_when_room()

    def _catch_up(self) -> None:
        """Show one piece of the rest, then let the loop do other work."""
        self._waits_for_room = False
        if self._console.closed:
            self._backlog.forget()
        if data := self._backlog.take():
            self._pass_on(data)
        if self._backlog.size:
            self._catch_up_when_room()
        elif self._ended:
            self._finish()
        if not self._backlog.full:
            self._read_on()

    def _catch_up_when_room(self) -> None:
        if self._waits_for_room:
            return
        self._waits_for_room = True
        if self._console.room:
            self._loop.call_soon(self._catch_up)
        else:
            self._console.when_room(self._catch_up)

    def _end(self) -> None:
        """Finish: the worker and all it started have closed the stream."""
        if self._ended:
            return
        self._ended = True
        self._pause()
        os.close(self._read_end)
        if self._filtered is not None:
            self._write_filtered(self._filtered_lines.rest())
            self._filtered.close()
        if self._backlog.size == 0:
            self._finish()

    def _finish(self) -> None:
        if not self.finished.is_set():
            if self._stacks is not None and (rest := self._stacks.rest()):
                self._write(rest)
            self._show(self._shown_lines.rest())
            self._backlog.close()
            self.finished.set()

    def _give_up_console(self) -> None:
        while self._console.room and (data := self._backlog.take()):
            self._pass_on(data)
        if self._backlog.size:
            where = f"; {self._path} has it" if self._path else ""
            log.warning(
                "The console is too slow: %d bytes are not shown%s.", self._backlog.size, where
            )
            self._backlog.forget()
        self._finish()

    def _pass_on(self, data: bytes) -> None:
        if self._stacks is not None:
            data = self._stacks.feed(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        if self._prefix is None:
            self._console.write(data)
        else:
            self._show(self._shown_lines.feed(data))

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            prefix = self._prefix or b""
            self._console.write(b"".join(prefix + line + b"\n" for line in lines))

    def _write_filtered(self, lines: list[bytes]) -> None:
        assert self._filtered is not None
        for line in lines:
            self._filtered.offer(self._prefix or b"", line)

    def _read_on(self) -> None:
        if not self._reading and not self._ended:
            self._loop.add_reader(self._read_end, self._on_readable)
            self._reading = True

    def _pause(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._read_end)
            self._reading = False
