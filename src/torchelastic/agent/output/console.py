"""What the agent itself says to people, on stderr, without ever waiting for them to read it.

A line is written at once. Where that would wait, because a terminal was stopped by Ctrl-S or nobody
reads a pipe, it is left to a thread, with all that is said after it. Users' texts in it, such as
an exception's message, are shown and not obeyed.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque

from torchelastic.agent.output.nonblocking_writer import NonblockingWriter
from torchelastic.agent.output.terminal_text import one_line, plain

#: Bytes that wait for a reader; what is said beyond that is lost.
MOST = 256 * 1024
#: Seconds the reader has for the last words, when the agent ends.
PATIENCE = 2.0
#: Of a terminal that does not know how wide it is.
_COLUMNS = 80


class Console(logging.Handler):
    """Lines for people. To be closed in the end, which waits a little for whoever is slow."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._guard = threading.Lock()
        #: Said, not written yet; its size; and how many lines had no room.
        self._behind: deque[bytes] = deque()
        self._weight = 0
        self._lost = 0
        self._writer: threading.Thread | None = None
        self._fd = fd
        #: Characters of the line that is drawn and may be drawn over.
        self._drawn = 0
        try:
            self._output: NonblockingWriter | None = NonblockingWriter(fd)
        except OSError:
            self._output = None  # started without stderr: there is nobody to tell

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))

    def say(self, text: str) -> None:
        """Some lines."""
        if self._output is None:
            return
        data = plain(text).encode() + b"\n"
        with self._guard:
            data = self._erasing() + data
            if not self._behind:
                data = self._written(self._output, data)
            if data:
                self._leave(self._output, data)

    # --- a line that is drawn over ---------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        return self._output is not None and os.isatty(self._fd)

    def redraw(self, text: str) -> None:
        """On a terminal: have this in place of what was drawn last; nothing, if it is empty.

        Whatever is said goes over it, too. Whoever does not read is spared it.
        """
        if self._output is None or not self.is_terminal:
            return
        line = self._one_line(text) if text else ""
        with self._guard:
            if self._behind:
                return
            data = self._erasing() + line.encode()
            self._drawn = len(line)
            if rest := self._written(self._output, data):
                self._leave(self._output, rest)

    def _one_line(self, text: str) -> str:
        """With its mark, cut to the width of the terminal: a line that wraps stays there."""
        whole = self.format(logging.makeLogRecord({"msg": text}))
        columns = os.get_terminal_size(self._fd).columns or _COLUMNS
        return one_line(whole)[: columns - 1]

    def _erasing(self) -> bytes:
        """What removes the line that is drawn; with spaces, which every terminal knows."""
        drawn, self._drawn = self._drawn, 0
        return b"\r%b\r" % (b" " * drawn) if drawn else b""

    # --- who is slow -----------------------------------------------------------------------------

    def drain(self, patience: float = PATIENCE) -> None:
        """Give whoever reads so many seconds for the rest."""
        writer = self._writer
        if writer is not None:
            writer.join(patience)

    def _written(self, output: NonblockingWriter, data: bytes) -> bytes:
        """Write what can be written now; returns the rest."""
        try:
            while data:
                data = data[output.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""  # nobody reads any more, or the disk is full: there is no one to tell it to
        return b""

    def _leave(self, output: NonblockingWriter, data: bytes) -> None:
        """For the thread, which is there only while somebody is slow."""
        if self._weight + len(data) > MOST:
            self._lost += 1
            return
        self._behind.append(data)
        self._weight += len(data)
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._catch_up, args=(output,), name="torchelastic-words", daemon=True
            )
            self._writer.start()

    def _catch_up(self, output: NonblockingWriter) -> None:
        while True:
            select.select([], [output.watched], [])  # however long that takes
            with self._guard:
                if not self._next(output):
                    self._writer = None
                    return

    def _next(self, output: NonblockingWriter) -> bool:
        """Write what there is room for; whether there is more."""
        while self._behind:
            data = self._behind.popleft()
            self._weight -= len(data)
            if rest := self._written(output, data):
                self._behind.appendleft(rest)
                self._weight += len(rest)
                return True
        if self._lost:
            said, self._lost = f"({self._lost} lines omitted: stderr was not read.)\n", 0
            self._behind.append(said.encode())
            self._weight += len(said)
            return True
        return False


def show(text: str) -> None:
    """Say something that is no line of a log, in its turn."""
    for handler in logging.getLogger("torchelastic").handlers:
        if isinstance(handler, Console):
            handler.say(text)
            return
    print(plain(text), file=sys.stderr, flush=True)
