"""Changes of watched keys that have not been delivered to the caller."""

from __future__ import annotations

import asyncio
from collections import deque

from torchelastic.errors import RendezvousLost
from torchelastic.transport.frames import Row


class WatchQueue:
    """The pending changes of one `watch`, or of one `follow`, which starts with the current
    value."""

    def __init__(self, prefix: str, after: int | None, *, one_key: bool = False) -> None:
        self.prefix = prefix
        self._one_key = one_key
        #: The revision of the last delivered change; None: nothing has been delivered.
        self.seen = after
        #: Whether the current rows have arrived; changes before that are out of order.
        self.live = False
        self._rows: deque[Row] = deque()
        #: Futures of callers that wait for a change.
        self._waiting: list[asyncio.Future[None]] = []
        self._lost: str | None = None

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            # After a reconnect the server may repeat changes that were in flight.
            is_news = self.seen is None or row.modified > self.seen
            if is_news and (row.key == self.prefix or not self._one_key):
                self.seen = row.modified
                self._rows.append(row)
                self._wake()

    def begin(self, revision: int) -> None:
        """Start: everything up to `revision` has been delivered."""
        self.live = True
        self._wake()
        if self.seen is None:
            self.take([Row(self.prefix, None, 0, revision)])  # the key is absent

    def lose(self, sentence: str) -> None:
        self._lost = sentence
        self._wake()

    async def next(self) -> Row:
        while not self._rows:
            await self._wait()
        return self._rows.popleft()

    async def _wait(self) -> None:
        if self._lost is not None:
            raise RendezvousLost(self._lost)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():  # done if its task was cancelled
                waiter.set_result(None)
        self._waiting.clear()


class Memo(WatchQueue):
    """A cached key that is read repeatedly: the server sends its changes."""

    def __init__(self, key: str) -> None:
        super().__init__(key, None, one_key=True)

    def take(self, rows: list[Row]) -> None:
        super().take(rows)
        while len(self._rows) > 1:
            self._rows.popleft()

    async def latest(self) -> Row:
        """The key as it is now, as far as this client can know."""
        while not self.live:
            await self._wait()
        return self._rows[-1]
