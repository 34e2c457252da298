"""The console: the agent's own lines on stderr, written without ever waiting for the reader.

A line is written at once. If that would block, because a terminal was stopped by Ctrl-S or a pipe
is not read, a thread writes it and all lines after it. Control sequences in users' texts, such as
an exception's message, are escaped. The second line of a message, and those after it, are indented:
no text from the network can pass for a message of the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
import sys
import threading
from collections import deque

from torchelastic.agent.output.output_stream import NonblockingWriter
from torchelastic.agent.output.terminal_text import one_line, plain
from torchelastic.clock import Clock
from torchelastic.events import words

#: Bytes that wait for a reader; lines beyond that are lost.
MOST_BYTES = 256 * 1024
#: Seconds the reader has for the rest, when the agent ends.
DRAIN_TIMEOUT = 2.0
#: The end of a line before one that is not indented.
_NEXT_LINE = re.compile(r"\n(?=\S)")
#: The width of a terminal that does not report one.
_COLUMNS = 80


class Console(logging.Handler):
    """A logging handler for stderr. Closing it waits a little for a slow reader."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._guard = threading.Lock()
        #: Lines not written yet; their size; and the number of lines that were lost.
        self._behind: deque[bytes] = deque()
        self._weight = 0
        self._lost = 0
        self._writer: threading.Thread | None = None
        self._fd = fd
        #: Characters of the line that may be drawn over.
        self._drawn = 0
        try:
            self._output: NonblockingWriter | None = NonblockingWriter(fd)
        except OSError:
            self._output = None  # started without stderr

    def emit(self, record: logging.LogRecord) -> None:
        self.say(_NEXT_LINE.sub("\n  ", self.format(record)))

    def say(self, text: str) -> None:
        """Write some lines."""
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
        """On a terminal, replace the drawn line by this one; remove it if this is empty.

        Other lines overwrite it, too. A reader that is behind does not get it.
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
        """Add the mark and cut to the width of the terminal: a wrapped line could not be erased."""
        whole = self.format(logging.makeLogRecord({"msg": text}))
        columns = os.get_terminal_size(self._fd).columns or _COLUMNS
        return one_line(whole)[: columns - 1]

    def _erasing(self) -> bytes:
        """The bytes that erase the drawn line; spaces work on every terminal."""
        drawn, self._drawn = self._drawn, 0
        return b"\r%b\r" % (b" " * drawn) if drawn else b""

    # --- who is slow -----------------------------------------------------------------------------

    def drain(self, timeout: float = DRAIN_TIMEOUT) -> None:
        """Wait up to `timeout` seconds until the rest is written."""
        writer = self._writer
        if writer is not None:
            writer.join(timeout)

    def _written(self, output: NonblockingWriter, data: bytes) -> bytes:
        """Write as much as possible now; return the rest."""
        try:
            while data:
                data = data[output.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""  # the reader is gone or the disk is full: drop it
        return b""

    def _leave(self, output: NonblockingWriter, data: bytes) -> None:
        """Leave it to the thread, which exists only while the reader is slow."""
        if self._weight + len(data) > MOST_BYTES:
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
        """Write as much as possible; True if there is more."""
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
    """Write a text without the log mark, in order with the log lines."""
    for handler in logging.getLogger("torchelastic").handlers:
        if isinstance(handler, Console):
            handler.say(text)
            return
    print(plain(text), file=sys.stderr, flush=True)


# --- the waiting line ----------------------------------------------------------------------------

# On a terminal, it shows what the job waits for and counts down in place. In a log file that would
# be a line every second; there the reporter logs it now and then.

#: Seconds between two lines.
TICK = 1.0


def sentence(what: str, left: float | None) -> str:
    """`waiting for nodes: 1 of at least 4 joined; missing: node3; for 4 min 53 s more`."""
    if left is None:
        return what
    return f"{what}; for {words.seconds(left)} more" if left >= 1 else f"{what}; any moment now"


class WaitingLine:
    """Counts down by this machine's clock."""

    def __init__(self, screen: Console, clock: Clock) -> None:
        self._screen = screen
        self._clock = clock
        self._what = ""
        self._until: float | None = None

    def show(self, what: str, timeout: float | None = None) -> bool:
        """Show `what` with a countdown of `timeout` seconds; False if there is no terminal."""
        if not self._screen.is_terminal:
            return False
        self._what = what
        self._until = None if timeout is None else self._clock.now() + timeout
        self._draw()
        return True

    def clear(self) -> None:
        """Remove the line."""
        if self._what:
            self._what = ""
            self._screen.redraw("")

    def _draw(self) -> None:
        left = None if self._until is None else max(0.0, self._until - self._clock.now())
        self._screen.redraw(sentence(self._what, left))

    async def run(self) -> None:
        """Redraw for as long as the agent runs."""
        while self._screen.is_terminal:
            await asyncio.sleep(TICK)
            if self._what:
                self._draw()
