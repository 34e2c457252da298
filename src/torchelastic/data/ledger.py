"""The ledger: the samples that each committed step used, one JSON line per step and rank.

    {"generation":2,"step":41,"rank":0,"epoch":1,"ids":[17,4,99],"size":3,"span":[96,104]}

`ids` are sample numbers, or pairs [shard, record] of a stream. `span` is the range of positions in
the epoch's order that all ranks of the step took, from (inclusive) to (exclusive); `size` is the
number of ranks. `"skipped":true` marks a step that a `torchelastic.Guard` skipped: its samples were
handed out and do not come again, but were not trained. A rank that is killed after its gradients
were exchanged, but before it committed, writes no line; the span in the lines of its peers accounts
for its samples.

Each rank and generation has one file, `g2-r0.jsonl`, to which one thread of one process appends. A
line reaches the kernel shortly after `committed` returns, and then survives the death of the
process, but not of the machine. `flush` waits for that; `close` also syncs to disk. A killed
process loses the lines that its thread had not written yet, and may leave half a line.

Training never waits for the ledger and never fails because of it. Lines that cannot be written, for
example on a full disk, are lost: the log warns once, and the file records the number of lost lines
as soon as it can be written again.
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

#: Lines that may wait for a hung disk; further lines are lost.
QUEUE_LIMIT = 100_000
#: Seconds that a process waits for the disk when it exits.
EXIT_TIMEOUT = 10.0

_SUFFIX = ".jsonl"


def file_name(generation: int, rank: int) -> str:
    """Return the name of the file for a rank in a generation."""
    return f"g{generation}-r{rank}{_SUFFIX}"


class Ledger:
    """Writes the lines of this process into a directory, in a background thread.

    The first line creates the directory. Nodes may use different directories: pass all of them to
    the checker. Use a new directory for every start of a job, unless its generation numbers
    continue.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._writer = _Writer(self.directory)
        # Also closes the ledger when the process exits.
        self._closed = weakref.finalize(self, self._writer.close)

    @property
    def lost(self) -> int:
        """The number of lines that could not be written."""
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
        skipped: bool = False,
    ) -> None:
        """Record that this rank committed `step` and used these samples, or skipped them. Returns
        at once.

        Several calls for one step add up, for example if the step spans two epochs. `ids` may be a
        tensor, and is copied.
        """
        copy = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        line = {"generation": generation, "step": step, "rank": rank, "epoch": epoch, "ids": copy}
        if size is not None:
            line["size"] = size
        if span is not None:
            line["span"] = list(span)
        if skipped:
            line["skipped"] = True
        self._writer.put(line)

    def record(
        self, generation: int, step: int, handed: Iterable[Handed], *, skipped: bool = False
    ) -> None:
        """Record what a sampler has committed: `ledger.record(g, n, sampler.latest)`."""
        for one in handed:
            self.committed(
                generation,
                step,
                one.rank,
                one.epoch,
                one.ids,
                size=one.size,
                span=one.span,
                skipped=skipped,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all lines so far are written or lost; False if that takes longer."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write the remaining lines and sync to disk. Later lines are lost."""
        self._closed()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Writer:
    """The writer thread. Holds no reference to the ledger, so that it can be collected."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Lines; events that `flush` waits for; None at the end.
        self._queue: SimpleQueue[dict[str, Any] | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = True
        self._file: _File | None = None
        self.lost = 0

    def put(self, line: dict[str, Any]) -> None:
        if not self._open:
            self._lose("the ledger is closed", line)
        elif self._queue.qsize() >= QUEUE_LIMIT:
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
            thread.join(EXIT_TIMEOUT)
            if thread.is_alive():
                log.warning("The ledger in %s is incomplete: its disk is hung.", self._directory)

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
        """Write a line. Errors, also those of the user's ids, must not end the thread."""
        try:
            self._file_of(line).append(line)
        except (OSError, TypeError, ValueError) as error:
            self._lose(error, line)
            if self._file is not None:
                self._file.lost += 1  # recorded when the file can be written again

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
            log.warning(
                "The ledger %s may be incomplete: syncing it to disk failed (%s).", file.path, error
            )

    def _lose(self, why: object, line: dict[str, Any]) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning(
                "The ledger in %s loses lines from step %s on: %s. Training continues, but the "
                "ledger no longer proves which samples were used.",
                self._directory,
                line["step"],
                why,
            )


class _File:
    """The lines of one rank in one generation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Lost lines, and how many of them the file records.
        self.lost = self._said = 0
        self._fd: int | None = None
        #: The last line may be cut short.
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
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def _opened(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
            if os.fstat(self._fd).st_size:
                self._torn = True
                log.warning(
                    "%s already exists. If this is a new start of the job, its samples will look "
                    "as if they were used twice: use another ledger directory for every start.",
                    self.path,
                )
        return self._fd


def _encoded(line: dict[str, Any]) -> bytes:
    # `default`: JSON does not know the numbers of numpy.
    return json.dumps(line, separators=(",", ":"), default=int).encode() + b"\n"
