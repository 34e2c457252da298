"""The ledger: which samples each committed step has used, one JSON line for each step and rank.

    {"generation":2,"step":41,"rank":0,"epoch":1,"ids":[17,4,99],"size":3,"span":[96,104]}

`ids` are sample numbers, or pairs [shard, record] of a stream. `span` says which positions of the
epoch's order all ranks of the step took together, from (inclusive) to (exclusive), and `size` how
many ranks they were. With a span the others' lines speak for a rank that was killed when its
gradients were in, but before it had committed the step: it never writes a line.

There is one file for each rank and generation, `g2-r0.jsonl`, appended to by one thread of one
process. A line is with the kernel a moment after `committed` returns, and then survives the death
of the process, not that of the machine. `flush` waits for that; `close` does, and writes to the
disk. A process that is killed loses what its thread had not come to, and may leave half a line.

The training never waits for the ledger, nor fails by it. Lines that cannot be written, on a full
disk say, are lost; the log says so once, and the file says how many as soon as it can be written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchelastic.data.progress import Handed

log = logging.getLogger(__name__)

#: Lines that may wait for a disk that hangs, before they are lost.
MOST_WAITING = 100_000
#: How long the end of a process waits for a disk, in seconds.
PATIENCE = 10.0

_SUFFIX = ".jsonl"


def file_name(generation: int, rank: int) -> str:
    """Of the lines of a rank in a generation."""
    return f"g{generation}-r{rank}{_SUFFIX}"


class Ledger:
    """Writes the lines of this process into a directory, in a thread of its own.

    The directory is made when the first line is written. It may be another one on each node: the
    checker is shown all of them. Give every start of a job a directory of its own, unless its
    generations go on counting.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._writer = _Writer(self.directory)
        # At the end of the process, too, where nobody closes it.
        self._closed = weakref.finalize(self, self._writer.close)

    @property
    def lost(self) -> int:
        """How many lines could not be written."""
        return self._writer.lost

    def committed(
        self,
        generation: int,
        step: int,
        rank: int,
        epoch: int,
        ids: Iterable[Any],
        *,
        size: int | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Step `step` is committed on this rank, which used these samples for it. Returns at once.

        Several calls for one step add up: of several epochs, if the step went beyond the end of
        one. `ids` may be a tensor, and is copied.
        """
        copy = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        line = {"generation": generation, "step": step, "rank": rank, "epoch": epoch, "ids": copy}
        if size is not None:
            line["size"] = size
        if span is not None:
            line["span"] = list(span)
        self._writer.put(line)

    def record(self, generation: int, step: int, handed: Iterable[Handed]) -> None:
        """The same, of what a sampler says was committed: `ledger.record(g, n, sampler.latest)`."""
        for one in handed:
            self.committed(
                generation, step, one.rank, one.epoch, one.ids, size=one.size, span=one.span
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all lines so far are with the kernel, or lost; False if that takes longer."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is left, and have it on disk. Afterwards lines are lost."""
        self._closed()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Writer:
    """The thread. It does not know the ledger: that is to be collected when nobody else does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Lines; events that somebody waits for; None at the end.
        self._queue: SimpleQueue[dict[str, Any] | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = True
        self._file: _File | None = None
        self.lost = 0

    def put(self, line: dict[str, Any]) -> None:
        if not self._open:
            self._lose("it is closed", line)
        elif self._queue.qsize() >= MOST_WAITING:
            self._lose("the disk is too slow", line)
        elif self._thread is not None or self._start(line):
            self._queue.put(line)

    def flush(self, timeout: float | None) -> bool:
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout)

    def close(self) -> None:
        self._open = False
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        if thread is not threading.current_thread():  # the collector may run anywhere
            thread.join(PATIENCE)
            if thread.is_alive():
                log.warning("The ledger in %s is incomplete: its disk hangs.", self._directory)

    def _start(self, line: dict[str, Any]) -> bool:
        thread = threading.Thread(target=self._run, name="torchelastic-ledger", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads; the training may do without this one
            self._lose(error, line)
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(item)
        if self._file is not None:
            self._close_file(self._file)

    def _write(self, line: dict[str, Any]) -> None:
        """Whatever goes wrong here, user code's ids included, must not end the thread."""
        try:
            self._file_of(line).append(line)
        except (OSError, TypeError, ValueError) as error:
            self._lose(error, line)
            if self._file is not None:
                self._file.lost += 1  # it says so when it can be written again

    def _file_of(self, line: dict[str, Any]) -> _File:
        path = self._directory / file_name(line["generation"], line["rank"])
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._close_file(self._file)
            self._file = _File(path)
        return self._file

    def _close_file(self, file: _File) -> None:
        try:
            file.close()
        except OSError as error:
            log.warning("The ledger %s may be incomplete on disk (%s).", file.path, error)

    def _lose(self, why: object, line: dict[str, Any]) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning(
                "Lines of the ledger in %s are lost, from step %s on: %s. The training goes on, "
                "but nothing will prove which samples it has used.",
                self._directory,
                line["step"],
                why,
            )


class _File:
    """The lines of one rank in one generation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: How many of its lines are lost, and how many the file says are.
        self.lost = self._said = 0
        self._fd: int | None = None
        #: Whether the last line may be cut short.
        self._torn = False

    def append(self, line: dict[str, Any]) -> None:
        text = _encoded(line)
        if self.lost > self._said:
            whose = {name: line[name] for name in ("generation", "rank")}
            self._put(_encoded(whose | {"lost": self.lost}))
            self._said = self.lost
        self._put(text)

    def close(self) -> None:
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = None

    def _put(self, data: bytes) -> None:
        fd = self._opened()
        data = b"\n" + data if self._torn else data
        written = os.write(fd, data)
        # The rest of a line that a full disk cut short must not be glued to the next one.
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"{written} of {len(data)} bytes were written")

    def _opened(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
            if os.fstat(self._fd).st_size:
                self._torn = True
                log.warning(
                    "%s is there already. If the job was started anew and counts its generations "
                    "from 0, its samples will seem to be used twice: give every start a directory.",
                    self.path,
                )
        return self._fd


def _encoded(line: dict[str, Any]) -> bytes:
    # `default`: numbers of numpy are no numbers of JSON's.
    return json.dumps(line, separators=(",", ":"), default=int).encode() + b"\n"
