"""One of the agent's own output streams, on which it shows its workers' output.

It never waits for the reader (`nonblocking_writer`): the rest is queued here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from torchelastic.agent.output.nonblocking_writer import NonblockingWriter

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
