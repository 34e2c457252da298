"""A lease of this process at a store, as far as the process itself can know.

The store ends a lease that is not renewed in time, and says so when it is asked. But nobody can be
asked who is out of reach, and an answer that was read late is old. So the holder ends its lease by
its own clock as well, never later than the store does, and at once when it stood still itself:
then the others may have given it up, whatever the store still says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchelastic.clock import Clock
from torchelastic.errors import RendezvousError, RendezvousLost

log = logging.getLogger(__name__)

#: The loop shows this many times that it runs before it would count as standing still.
SIGNS_OF_LIFE = 4


class HeldLease:
    """One lease, from its opening until it has ended or is given back. Made in a running loop.

    It ends `seconds` after the last renewal was asked for, and when the loop has not run for
    `standstill` seconds; `lost` is set then. Whoever acts on an answer calls `check` before: after
    a stop of the process, what came meanwhile is read before any timer runs.
    """

    def __init__(
        self,
        id: str,
        *,
        seconds: float,
        standstill: float,
        sent: float,
        clock: Clock,
        lost: asyncio.Event,
    ) -> None:
        self.id = id
        self.is_held = True
        self._seconds = seconds
        self._standstill = standstill
        #: Counted from before the request left: the store counts from when it came.
        self._until = sent + seconds
        self._clock = clock
        self._lost = lost
        #: When the loop was last seen to run.
        self._seen = clock.now()
        self._timer = self._set_timer()
        lost.clear()

    def renewed(self, sent: float) -> None:
        """The store has renewed it, asked at `sent`."""
        self._until = max(self._until, sent + self._seconds)

    def check(self) -> bool:
        """Whether it is held still; ends it if it may be over."""
        now = self._clock.now()
        if now >= self._until or now - self._seen >= self._standstill:
            self.end()
        self._seen = now
        return self.is_held

    def end(self) -> None:
        """It is lost, as the store says or as we must assume."""
        if self.is_held:
            self.give_back()
            self._lost.set()

    def give_back(self) -> None:
        """Hold it no more; it is not lost."""
        self.is_held = False
        self._timer.cancel()

    async def keep(self, renew: Callable[[], Awaitable[object]], every: float) -> None:
        """Renew it every so many seconds until it ends."""
        while self.is_held:
            await asyncio.sleep(every)
            try:
                await renew()
            except RendezvousLost:
                return
            except RendezvousError as error:
                # Our own clock ends the lease; whoever asks next is told the reason.
                log.warning("The lease could not be renewed: %s", error)

    def _set_timer(self) -> asyncio.TimerHandle:
        left = self._until - self._clock.now()
        delay = max(min(left, self._standstill / SIGNS_OF_LIFE), 0.0)
        return asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        if self.check():
            self._timer = self._set_timer()
