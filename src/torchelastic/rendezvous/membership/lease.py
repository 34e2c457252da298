"""A lease of this process at a store, as seen by the process itself.

The store ends a lease that is not renewed in time, and says so when asked. But an unreachable store
cannot be asked, and an answer that is read late is outdated. So the holder also ends its lease by
its own clock, never later than the store does, and at once after it was frozen itself: the others
may then have dropped it, whatever the store still says.
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
    """One lease, from its opening until it ends or is given back. Made in a running loop.

    It ends `seconds` after the last renewal was asked for, and when the loop has not run for
    `standstill` seconds; then `lost` is set. Call `check` before acting on an answer: after a
    freeze of the process, received data is read before any timer runs.
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
        on_until: Callable[[float], None] = lambda until: None,
    ) -> None:
        """`on_until` receives the time until which it is held, again after every renewal."""
        self.id = id
        self.is_held = True
        self._seconds = seconds
        self._standstill = standstill
        #: Counted from before the request left: the store counts from when it came.
        self.until = sent + seconds
        self._clock = clock
        self._lost = lost
        self._on_until = on_until
        #: When the loop was last seen to run.
        self._seen = clock.now()
        self._timer = self._set_timer()
        lost.clear()
        on_until(self.until)

    def renewed(self, sent: float) -> None:
        """Note that the store has renewed it, asked at `sent`."""
        self.until = max(self.until, sent + self._seconds)
        self._on_until(self.until)

    def check(self) -> bool:
        """Return whether it is still held; ends it if it may be over."""
        now = self._clock.now()
        if now >= self.until or now - self._seen >= self._standstill:
            self.end()
        self._seen = now
        return self.is_held

    def end(self) -> None:
        """Mark the lease as lost, by the store's word or by assumption."""
        if self.is_held:
            self.give_back()
            self._lost.set()

    def give_back(self) -> None:
        """Stop holding it; it is not lost."""
        self.is_held = False
        self._timer.cancel()

    async def keep(self, renew: Callable[[], Awaitable[object]], every: float) -> None:
        """Renew it periodically until it ends."""
        while self.is_held:
            await asyncio.sleep(every)
            try:
                await renew()
            except RendezvousLost:
                return
            except RendezvousError as error:
                # Our own clock ends the lease; the next request gets the reason.
                log.warning("The lease could not be renewed: %s", error)

    def _set_timer(self) -> asyncio.TimerHandle:
        left = self.until - self._clock.now()
        delay = max(min(left, self._standstill / SIGNS_OF_LIFE), 0.0)
        return asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        if self.check():
            self._timer = self._set_timer()
