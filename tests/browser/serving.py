"""The real server of the page in a thread, with pictures that a test gives it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.job_state import JobState, packed
from torchelastic.dashboard.page_server import Server

#: Seconds, as the real pictures have it.
AGAIN = 5.0


class Shown:
    """The picture that the page shows; `show` another one at any time, from any thread."""

    def __init__(self, picture: dict[str, Any]) -> None:
        #: As when the server hangs: nothing is said any more.
        self.silent = False
        self._data = picture
        self._made = time.monotonic()
        self._latest = JobState.of(1, picture, live=picture["live"])

    def show(self, picture: dict[str, Any]) -> None:
        self._data, self._made = picture, time.monotonic()
        number = self._latest.number + 1
        self._latest = JobState.of(number, picture, live=picture["live"])

    def show_torn(self) -> None:
        """Half of a picture."""
        number = self._latest.number + 1
        frame = b'event: picture\nid: %d\ndata: {"now": 1\n\n' % number
        self._latest = JobState(number, True, b"", frame, packed(frame))

    def look(self) -> JobState:
        """Of a job that goes on there is a new one every few seconds."""
        if self._latest.live and not self.silent and time.monotonic() - self._made > AGAIN:
            self.show(self._data)
        return self._latest


class Served:
    """A server that can go away and come back at the same port."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="page server")
        self._server: Server | None = None
        self._port = 0
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        self._server = self._do(self._open())

    def stop(self) -> None:
        if self._server is not None:
            self._do(self._server.close())
            self._server = None

    def end(self) -> None:
        self.stop()
        self._do(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> Server:
        server = Server(self._shown, AccessControl(None))
        _, self._port = await server.open("127.0.0.1", self._port)
        return server


@contextmanager
def served(picture: dict[str, Any]) -> Iterator[tuple[Served, Shown]]:
    shown = Shown(picture)
    page = Served(shown)
    try:
        page.start()
        yield page, shown
    finally:
        page.end()
