"""The non-blocking writer: writes to a descriptor without ever waiting for its reader.

The agent keeps leases alive and watches workers from one loop: a terminal stopped by Ctrl-S or a
pipe that is not read must not block it. `O_NONBLOCK` on the inherited descriptor would be shared
with the shell and with every worker that inherits it (their `print` would fail), so:

* a pipe or a terminal is opened once more, through /proc, with the flag on our own opening only
  (if that fails, each write is preceded by a check whether it would block);
* a socket is written with the flag on each call;
* a regular file never blocks and is written as it is.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable

#: A pipe that is writable at all takes this much at once.
_PIPE_BUF = select.PIPE_BUF
#: A terminal that is writable has little room, but its buffer grows in pieces no smaller than this.
_TERMINAL_ROOM = 128


class NonblockingWriter:
    """Raises `OSError` where there is no such descriptor."""

    def __init__(self, fd: int) -> None:
        #: The descriptor to poll for room.
        self.watched = fd
        #: Writes some bytes and returns how many; raises `BlockingIOError` instead of waiting.
        self.send: Callable[[bytes], int]
        self._close_fd: Callable[[], None] = _nothing
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._write_to_socket(fd)
        elif stat.S_ISFIFO(mode) or os.isatty(fd):
            self._write_to_own_opening(fd)
        else:
            self.send = lambda data: os.write(fd, data)

    def close(self) -> None:
        """The inherited descriptor itself stays open."""
        self._close_fd()
        self._close_fd = _nothing

    def _write_to_socket(self, fd: int) -> None:
        peer = socket.socket(fileno=os.dup(fd))
        self.watched, self._close_fd = peer.fileno(), peer.close
        self.send = lambda data: peer.send(data, socket.MSG_DONTWAIT)

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
