"""The HTTP server of the page.

The state of the job is made in a thread, once for all viewers, and only while there are any. Each
viewer gets the latest state when it has received the last: a slow viewer skips states.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchelastic.config import PAGE_ANYWHERE, PAGE_PORT, format_endpoint, parse_endpoint
from torchelastic.dashboard import responses
from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.job_state import PACKED_HEAD, STILL_HERE, JobState, StateReader, packed
from torchelastic.dashboard.responses import Reply, Wanted
from torchelastic.errors import EXIT_OK
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import http, http_socket
from torchelastic.transport.addresses import loopback_addresses
from torchelastic.transport.credentials import read_secret

logger = logging.getLogger(__name__)

#: Connections at a time, and streams among them.
MOST, MOST_STREAMS = 256, 200
#: Connections that wait to be accepted.
BACKLOG = 128
#: Seconds between two states, at least and at most; in between, so long that making them uses at
#: most this share of a processor.
PERIOD, LONGEST, SHARE = 0.5, 5.0, 0.1
#: Seconds for a request or a response, and between keep-alives of a stream.
REQUEST_TIMEOUT, KEEP_ALIVE = 10.0, 15.0
#: Seconds to send the last state when the job has ended.
LAST = 2.5
#: Send buffer of one viewer: those that never read must not cost much.
HELD = 64 * 1024

_PACKED_STILL_HERE = packed(STILL_HERE)


@dataclass
class Viewer:
    """A connection: whether it is a stream, and the last state it was sent."""

    connection: socket.socket
    streams: bool = False
    shown: int = 0
    #: Its task is cancelled, but has not ended yet.
    leaving: bool = False


class Server:
    """Serves the page and the state of a job at one address."""

    def __init__(self, source: StateReader, access: AccessControl) -> None:
        self._source, self._access = source, access
        self._files = responses.load_files()
        self._listener: socket.socket | None = None
        self._tasks = TaskSet()
        #: Connected viewers, the oldest first.
        self._viewers: dict[asyncio.Task[None], Viewer] = {}
        self._latest: JobState | None = None
        self._looking = asyncio.Lock()
        self._made = float("-inf")
        self._took = 0.0
        self._complained = False
        #: Set while there are streams; and, replaced each time: set by a newer state.
        self._watched = asyncio.Event()
        self._news = asyncio.Event()

    async def open(self, address: str, port: int) -> tuple[str, int]:
        """Listen and return the address. Raises `OSError` if it cannot listen."""
        self._listener = await http_socket.listen(address, port, BACKLOG)
        self._tasks.start(self._accept(self._listener), "accept")
        self._tasks.start(self._keep_looking(), "look")
        host, number = self._listener.getsockname()[:2]
        return str(host), int(number)

    async def last_words(self) -> None:
        """Send all streams the final state; slow viewers are not waited for long."""
        if not self._streams():
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tell_the_end(), LAST)

    async def close(self) -> None:
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    # --- states ----------------------------------------------------------------------------------

    def _streams(self) -> list[Viewer]:
        return [viewer for viewer in self._viewers.values() if viewer.streams]

    async def _keep_looking(self) -> None:
        while True:
            await self._watched.wait()
            await self._look()
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        return min(max(PERIOD, self._took * (1 / SHARE - 1)), LONGEST)

    async def _look(self, *, age: float = 0.0) -> JobState | None:
        """Make a state, unless the last is at most `age` seconds old; the last one on failure."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if self._latest is not None and loop.time() - self._made < age:
                return self._latest
            try:
                self._took, state = await asyncio.to_thread(_timed, self._source.look)
            except Exception:  # the next attempt may succeed
                self._complain()
                return self._latest
            self._made = loop.time()
            if self._latest is None or state.number != self._latest.number:
                self._latest = state
                self._news.set()
                self._news = asyncio.Event()
            return self._latest

    def _complain(self) -> None:
        """Log once: it may fail twice a second from now on."""
        if not self._complained:
            self._complained = True
            logger.exception("The dashboard cannot read the state of the job; it keeps trying.")

    async def _tell_the_end(self) -> None:
        state = await self._look()
        while state and any(viewer.shown < state.number for viewer in self._streams()):
            await asyncio.sleep(0.01)

    # --- viewers ---------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in http_socket.accepted(listener):
            self._make_room()
            viewer = Viewer(connection)
            task = self._tasks.start(self._serve(viewer), "reader")
            self._viewers[task] = viewer
            task.add_done_callback(self._ended)

    def _make_room(self) -> None:
        """Cancel the oldest request if there are too many connections.

        There is one, since streams are limited to fewer. Many connections may come before a
        cancelled one has ended.
        """
        staying = [(task, viewer) for task, viewer in self._viewers.items() if not viewer.leaving]
        if len(staying) >= MOST:
            task, viewer = next(one for one in staying if not one[1].streams)
            viewer.leaving = True
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._viewers.pop(task).connection.close()  # here: a task may be cancelled before it starts
        if not self._streams():
            self._watched.clear()

    async def _serve(self, viewer: Viewer) -> None:
        try:
            head = await asyncio.wait_for(
                http_socket.receive_head(viewer.connection), REQUEST_TIMEOUT
            )
            if head is not None:
                await self._answer(http.parse(head), viewer)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("a viewer disconnected: %r", error)
        except Exception:  # logged here: nothing waits for this task
            logger.exception("The dashboard could not answer a request.")

    async def _answer(self, request: http.Request | None, viewer: Viewer) -> None:
        found = responses.answer(request, self._access, self._files)
        reply = found if isinstance(found, Reply) else None
        if request is not None and not isinstance(found, Reply):
            reply = await self._show(found, request, viewer)
        if reply is not None:
            head_only = request is not None and request.method == "HEAD"
            await _send(viewer.connection, reply.to_bytes(body=not head_only))
            viewer.connection.shutdown(socket.SHUT_WR)

    async def _show(self, wanted: Wanted, request: http.Request, viewer: Viewer) -> Reply | None:
        """Return the current state, or None after serving a stream to its end."""
        if wanted == "state":
            return responses.state(await self._look(age=self._pause()))
        if request.method == "HEAD":
            return responses.STREAM
        if len(self._streams()) >= MOST_STREAMS:
            return responses.refusal(503)
        viewer.streams = True
        self._watched.set()
        await self._stream(viewer, packs=responses.takes_gzip(request))
        return None

    async def _stream(self, viewer: Viewer, *, packs: bool) -> None:
        """Send states until the viewer disconnects or stops reading."""
        loop = asyncio.get_running_loop()
        viewer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD)
        # Viewers send nothing more: any data, or the end of the connection, ends the stream.
        gone = asyncio.ensure_future(loop.sock_recv(viewer.connection, 1))
        sending = asyncio.ensure_future(self._send_states(viewer, packs=packs))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)

    async def _send_states(self, viewer: Viewer, *, packs: bool) -> None:
        connection = viewer.connection
        await _send(connection, responses.stream_head(packed=packs) + PACKED_HEAD * packs)
        while True:
            news, state = self._news, self._latest
            if state is not None and state.number > viewer.shown:
                await _send(connection, state.packed if packs else state.frame)
                viewer.shown = state.number
                continue
            try:
                await asyncio.wait_for(news.wait(), KEEP_ALIVE)
            except asyncio.TimeoutError:
                await _send(connection, _PACKED_STILL_HERE if packs else STILL_HERE)


def _timed(look: Callable[[], JobState]) -> tuple[float, JobState]:
    """Return the processor time for a state, and the state; waiting on a busy machine is free."""
    began = time.thread_time()
    state = look()
    return time.thread_time() - began, state


async def _send(connection: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.wait_for(loop.sock_sendall(connection, data), REQUEST_TIMEOUT)


# --- the page at an address ----------------------------------------------------------------------

#: Where the page is if no host is given.
HOST = "127.0.0.1"


async def serve(
    source: StateReader,
    address: str,
    token: bytes | None,
    say: Callable[[str], None],
    *,
    until: int | None = None,
) -> int:
    """Serve the page, `say` its address, and return the exit code.

    Ends on SIGINT or SIGTERM, or when the other end of the descriptor `until` is closed. Raises
    `OSError` if it cannot listen.
    """
    host = HOST if address == PAGE_ANYWHERE else parse_endpoint(address)[0]
    if token is None and not loopback_addresses(host):
        token = secrets.token_urlsafe(24).encode()
    access = AccessControl(token)
    server = Server(source, access)
    try:
        where = await _open_at(server, address)
        say(f"http://{_host_name(*where)}/{access.query()}")
        await _asked_to_end(until)
        await server.last_words()
    finally:
        await server.close()
    return EXIT_OK


def load_token(path: str | None, flag: str) -> bytes | None:
    """Read the token; None without a file."""
    return read_secret(path, flag).reveal() if path is not None else None


async def _open_at(server: Server, address: str) -> tuple[str, int]:
    if address != PAGE_ANYWHERE:
        host, port = parse_endpoint(address)
        return await server.open((*loopback_addresses(host), host)[0], port)
    try:
        return await server.open(HOST, PAGE_PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return await server.open(HOST, 0)


def _host_name(host: str, port: int) -> str:
    """Return the address for browsers: the host name if it listens on all interfaces."""
    everywhere = host in ("0.0.0.0", "::")
    return format_endpoint(socket.gethostname() if everywhere else host, port)


async def _asked_to_end(until: int | None) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, asked.set)
    if until is not None:
        loop.add_reader(until, asked.set)
    await asked.wait()
    if until is not None:
        loop.remove_reader(until)
