"""The report of a hang, made once for all workers that hang together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.events import types as events
from torchelastic.events.analysis.hangs import HangDiagnosis, diagnose, event_of

logger = logging.getLogger(__name__)

#: Seconds for which the last findings are reused.
FRESH = 5.0


class HangReport:
    """Looks at all ranks of the world before one is killed, and reports the findings."""

    def __init__(
        self,
        look: Callable[[], Awaitable[WorldActivity]],
        tell: Callable[[int, events.Hang], None],
    ) -> None:
        self._look, self._tell = look, tell
        self._looking: asyncio.Task[WorldActivity] | None = None
        self._began = 0.0
        self._told: WorldActivity | None = None

    def begin(self) -> asyncio.Task[WorldActivity]:
        """Start looking, unless that has just been done."""
        if self._looking is None or time.monotonic() - self._began > FRESH:
            self._began = time.monotonic()
            self._looking = asyncio.ensure_future(self._look_safely())
        return self._looking

    async def _look_safely(self) -> WorldActivity:
        """Look; an error here must not end the job."""
        try:
            return await self._look()
        except Exception:
            logger.exception("Could not find out what the ranks are doing.")
            return WorldActivity()

    async def found(self, generation: int) -> WorldActivity:
        """Return the findings for this world, within seconds."""
        found = await asyncio.shield(self.begin())
        if found.generation >= generation:
            return found
        self._looking = None  # the last findings are from an earlier world
        return await asyncio.shield(self.begin())

    def diagnose(self, found: WorldActivity) -> HangDiagnosis:
        return diagnose(found.activities, found.unheard)

    def tell(self, found: WorldActivity) -> None:
        """Report the findings, once."""
        if found is not self._told and found.activities:
            self._told = found
            self._tell(found.generation, event_of(found.activities, found.unheard))

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
