"""One of the agent's own output streams, on which it shows its workers' output.

It never waits for the reader: the rest is queued here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import stat
from collections.abc import Callable

# The agent keeps leases alive and watches workers from one loop: a terminal stopped by Ctrl-S or a
# pipe that is not read must not block it. `O_NONBLOCK` on the inherited descriptor would be shared
# with the shell and with every worker that inherits it (their `print` would fail), so:
#
# * a pipe or a terminal is opened once more, through /proc, with the flag on our own opening only
#   (if that fails, each write is preceded by a check whether it would block);
# * a socket is written with the flag on each call;
# * a regular file never blocks and is written as it is.

#: A pipe that is writable at all takes this much at once.
_PIPE_BUF = select.PIPE_BUF
#: A terminal that is writable has little room, but its buffer grows in pieces no smaller than this.
_TERMINAL_ROOM = 128


class NonblockingWriter:
    """Writes to a descriptor without ever waiting for its reader.

    Raises `OSError` where there is no such descriptor.
    """

    def __init__(self, fd: int) -> None:
        #: The descriptor to poll for room.
        self.watched = fd
        #: Writes some bytes and returns how many; raises `BlockingIOError` instead of waiting.
        self.send: Callable[[bytes], int]
        self._close_fd: Callable[[], None] = _nothing
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            peer = socket.socket(fileno=os.dup(fd))
            self.watched, self._close_fd = peer.fileno(), peer.close
            self.send = lambda data: peer.send(data, socket.MSG_DONTWAIT)
        elif stat.S_ISFIFO(mode) or os.isatty(fd):
            self._write_to_own_opening(fd)
        else:
            self.send = lambda data: os.write(fd, data)

    def close(self) -> None:
        """The inherited descriptor itself stays open."""
        self._close_fd()
        self._close_fd = _nothing

    def _write_to_own_opening(self, fd: int) -> None:
        own = self._reopened(fd)
        if own is None:
            most = _TERMINAL_ROOM if os.isatty(fd) else _PIPE_BUF
            self.send = lambda data: _write_if_writable(fd, data[:most])
            return
        self.watched, self._close_fd = own, lambda: os.close(own)
        self.send = lambda data: os.write(own, data)

    @staticmethod
    def _reopened(fd: int) -> int | None:
        """The same pipe or terminal, opened non-blocking for us alone; None if that fails."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:
            return None  # no /proc, or a terminal of another user (su)


def _write_if_writable(fd: int, data: bytes) -> int:
    """Check before a small write. Another process's write in between can still block ours."""
    if not select.select([], [fd], [], 0)[1]:
        raise BlockingIOError
    return os.write(fd, data)


def _nothing() -> None:
    """Nothing to close."""


log = logging.getLogger(__name__)

#: Bytes taken in advance of the reader; beyond it `room` is False.
QUEUE = 256 * 1024


class OutputStream:
    """A queue of bytes in front of a descriptor. A reader that goes away ends it, quietly."""

    def __init__(self, fd: int) -> None:
        self._name = {1: "stdout", 2: "stderr"}.get(fd, f"descriptor {fd}")
        self._queue = bytearray()
        self._waiting: asyncio.AbstractEventLoop | None = None
        self._on_room: list[Callable[[], None]] = []
        self._flushed = asyncio.Event()
        self._flushed.set()
        self.closed = False
        self._output: NonblockingWriter | None = None
        try:
            self._output = NonblockingWriter(fd)
        except OSError:
            self.closed = True  # started without this stream

    @property
    def room(self) -> bool:
        """True if more may be written now; a closed console takes, and drops, everything."""
        return len(self._queue) < QUEUE

    def write(self, data: bytes) -> None:
        """Write `data`, now or as soon as there is room."""
        if self.closed:
            return
        self._queue += data
        if self._waiting is None:
            self._flush()

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back once, as soon as there is room again (or no reader)."""
        self._on_room.append(callback)

    async def flushed(self) -> None:
        """Wait until everything written has been handed to the reader."""
        await self._flushed.wait()

    def close(self) -> None:
        """Drop the queue; the inherited descriptor stays open."""
        self._stop_waiting()
        self._queue.clear()
        self.closed = True
        if self._output is not None:
            self._output.close()
        self._tell()

    def _flush(self) -> None:
        assert self._output is not None, "closed from the beginning"
        try:
            while self._queue:
                sent = self._output.send(bytes(self._queue[:QUEUE]))
                del self._queue[:sent]
        except BlockingIOError:
            self._wait()
        except OSError as error:
            log.info("The agent's %s was closed by its reader (%s).", self._name, error.strerror)
            self.close()
            return
        else:
            self._stop_waiting()
        self._tell()

    def _wait(self) -> None:
        self._flushed.clear()
        if self._waiting is None:
            assert self._output is not None
            self._waiting = asyncio.get_running_loop()
            self._waiting.add_writer(self._output.watched, self._flush)

    def _stop_waiting(self) -> None:
        if self._waiting is not None and self._output is not None:
            self._waiting.remove_writer(self._output.watched)
            self._waiting = None

    def _tell(self) -> None:
        if not self._queue:
            self._flushed.set()
        if self.room and self._on_room:
            callbacks, self._on_room = self._on_room, []
            for callback in callbacks:
                callback()
