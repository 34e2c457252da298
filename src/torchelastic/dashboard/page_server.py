"""The page's server. It only reads, and whoever looks does not matter to it for long.

A picture is made in a thread, once for all, and only while somebody looks. Each reader is sent the
latest one when it is done with the last: who is slow skips pictures, and none is kept for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torchelastic.dashboard import responses, static_files
from torchelastic.dashboard.access import Door
from torchelastic.dashboard.job_state import PACKED_HEAD, STILL_HERE, Picture, packed
from torchelastic.dashboard.responses import Reply, Wanted
from torchelastic.transport import http, http_socket

logger = logging.getLogger(__name__)

#: Connections at a time, and those among them that get one picture after the other.
MOST, MOST_STREAMS = 256, 200
#: That the kernel keeps for us.
BACKLOG = 128
#: Seconds between two pictures, at least and at most; in between, as long as it takes for pictures
#: to use no more than this share of a processor.
PERIOD, LONGEST, SHARE = 0.5, 5.0, 0.1
#: Seconds for a request, for an answer, and after which a silent stream is told that it goes on.
PATIENCE, KEEP_ALIVE = 10.0, 15.0
#: Seconds for the last picture, when the job has ended.
LAST = 2.5
#: Bytes the kernel holds for one reader: readers that never read must not cost much.
HELD = 64 * 1024

_PACKED_STILL_HERE = packed(STILL_HERE)


class Source(Protocol):
    """Where pictures come from; asked by one thread at a time."""

    def look(self) -> Picture: ...


@dataclass
class Talk:
    """A connection: whether it gets one picture after the other, and the last it was sent."""

    connection: socket.socket
    streams: bool = False
    shown: int = 0
    #: It has been told to go, and is still there until it gets its turn.
    leaving: bool = False


class Server:
    """Serves a job's pictures at one address."""

    def __init__(self, source: Source, door: Door) -> None:
        self._source, self._door = source, door
        self._files = static_files.load()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Who is connected, the oldest first.
        self._talks: dict[asyncio.Task[None], Talk] = {}
        self._latest: Picture | None = None
        self._looking = asyncio.Lock()
        self._made = float("-inf")
        self._took = 0.0
        self._complained = False
        #: Somebody looks; and, made anew each time: there is a newer picture.
        self._watched = asyncio.Event()
        self._news = asyncio.Event()

    async def open(self, address: str, port: int) -> tuple[str, int]:
        """Listen there; returns where that is. Raises `OSError` where it cannot be."""
        self._listener = await http_socket.listen(address, port, BACKLOG)
        for work in (self._accept(self._listener), self._keep_looking()):
            self._tasks.add(asyncio.create_task(work))
        host, number = self._listener.getsockname()[:2]
        return str(host), int(number)

    async def last_words(self) -> None:
        """Show those who look how the job ended; who does not read is not waited for long."""
        if not self._streams():
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tell_the_end(), LAST)

    async def close(self) -> None:
        ending = [*self._tasks, *self._talks]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    # --- pictures --------------------------------------------------------------------------------

    def _streams(self) -> list[Talk]:
        return [talk for talk in self._talks.values() if talk.streams]

    async def _keep_looking(self) -> None:
        while True:
            await self._watched.wait()
            await self._look()
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        return min(max(PERIOD, self._took * (1 / SHARE - 1)), LONGEST)

    async def _look(self, *, age: float = 0.0) -> Picture | None:
        """Make a picture, unless there is one of this age; the last there was where it fails."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if self._latest is not None and loop.time() - self._made < age:
                return self._latest
            try:
                self._took, picture = await asyncio.to_thread(_timed, self._source.look)
            except Exception:  # of one picture: the next may be right, and who looks waits for it
                self._complain()
                return self._latest
            self._made = loop.time()
            if self._latest is None or picture.number != self._latest.number:
                self._latest = picture
                self._news.set()
                self._news = asyncio.Event()
            return self._latest

    def _complain(self) -> None:
        """Once: it may be so twice a second from now on."""
        if not self._complained:
            self._complained = True
            logger.exception("The dashboard cannot read the state of the job; it keeps trying.")

    async def _tell_the_end(self) -> None:
        picture = await self._look()
        while picture and any(talk.shown < picture.number for talk in self._streams()):
            await asyncio.sleep(0.01)

    # --- who looks -------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in http_socket.accepted(listener):
            self._make_room()
            talk = Talk(connection)
            task = asyncio.create_task(self._talk(talk), name="reader")
            self._talks[task] = talk
            task.add_done_callback(self._ended)

    def _make_room(self) -> None:
        """There are fewer streams than places: somebody is there who has not been answered yet.

        Many may come before anybody who is told to go gets its turn, and is gone.
        """
        staying = [(task, talk) for task, talk in self._talks.items() if not talk.leaving]
        if len(staying) >= MOST:
            task, talk = next(one for one in staying if not one[1].streams)
            talk.leaving = True
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._talks.pop(task).connection.close()  # here: it may be told to go before it begins
        if not self._streams():
            self._watched.clear()

    async def _talk(self, talk: Talk) -> None:
        try:
            head = await asyncio.wait_for(http_socket.receive_head(talk.connection), PATIENCE)
            if head is not None:
                await self._answer(http.parse(head), talk)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("a reader is gone: %r", error)
        except Exception:  # told here: nobody waits for this task
            logger.exception("The dashboard could not answer a request.")

    async def _answer(self, request: http.Request | None, talk: Talk) -> None:
        found = responses.answer(request, self._door, self._files)
        reply = found if isinstance(found, Reply) else None
        if request is not None and not isinstance(found, Reply):
            reply = await self._show(found, request, talk)
        if reply is not None:
            head_only = request is not None and request.method == "HEAD"
            await _send(talk.connection, reply.to_bytes(body=not head_only))
            talk.connection.shutdown(socket.SHUT_WR)

    async def _show(self, wanted: Wanted, request: http.Request, talk: Talk) -> Reply | None:
        """The answer to who wants pictures; None after it has had them, one after the other."""
        if wanted == "picture":
            return responses.picture(await self._look(age=self._pause()))
        if request.method == "HEAD":
            return responses.STREAM
        if len(self._streams()) >= MOST_STREAMS:
            return responses.refusal(503)
        talk.streams = True
        self._watched.set()
        await self._stream(talk, packs=responses.takes_gzip(request))
        return None

    async def _stream(self, talk: Talk, *, packs: bool) -> None:
        """Pictures until the reader is gone, or takes nothing any more."""
        loop = asyncio.get_running_loop()
        talk.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD)
        # Readers say nothing more: what comes is the end, or noise that ends it as well.
        gone = asyncio.ensure_future(loop.sock_recv(talk.connection, 1))
        sending = asyncio.ensure_future(self._send_pictures(talk, packs=packs))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send_pictures(self, talk: Talk, *, packs: bool) -> None:
        connection = talk.connection
        await _send(connection, responses.stream_head(packed=packs) + PACKED_HEAD * packs)
        while True:
            news, picture = self._news, self._latest
            if picture is not None and picture.number > talk.shown:
                await _send(connection, picture.packed if packs else picture.frame)
                talk.shown = picture.number
                continue
            try:
                await asyncio.wait_for(news.wait(), KEEP_ALIVE)
            except asyncio.TimeoutError:
                await _send(connection, _PACKED_STILL_HERE if packs else STILL_HERE)


def _timed(look: Callable[[], Picture]) -> tuple[float, Picture]:
    """A picture, and the processor's time for it: on a busy machine, waiting is no work."""
    began = time.thread_time()
    picture = look()
    return time.thread_time() - began, picture


async def _send(connection: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.wait_for(loop.sock_sendall(connection, data), PATIENCE)
