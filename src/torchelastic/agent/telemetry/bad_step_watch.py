"""The bad step watch: logs each step with bad numbers once, with the reports of all ranks.

Every agent has one; it gets events where those of the whole job are (`job_events`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchelastic.agent.telemetry.clock_offset import linger
from torchelastic.clock import Clock
from torchelastic.events import words
from torchelastic.events.analysis.bad_steps import LEAVES_OUT, BadSteps
from torchelastic.events.record import Record
from torchelastic.events.types import StepSkipped

#: Seconds from the first report of a step to its line. Until then, other ranks report it, too.
DELAY = 0.3
#: Older reports were logged by an earlier leader.
OLDEST = 60.0


class BadStepWatch:
    """Collects reports for a moment, then logs them."""

    def __init__(self, say: Callable[[str], None], clock: Clock) -> None:
        self._say, self._clock = say, clock
        self._nodes = 1
        self._steps = BadSteps()
        #: Generation, step and action of the steps that were logged.
        self._told: set[tuple[int, int, str]] = set()
        self._saying: asyncio.TimerHandle | None = None
        self._skipped = False

    def turn_to(self, nodes: int) -> None:
        """Start of a world of `nodes` nodes."""
        self._nodes = nodes

    def take(self, record: Record) -> None:
        """Take one more event of the job."""
        if not isinstance(record.event, StepSkipped):
            return
        if self._clock.now() - record.time > OLDEST:
            return
        self._steps.feed(record)
        if self._saying is None:
            delay = DELAY + linger(self._nodes)
            self._saying = asyncio.get_running_loop().call_later(delay, self.say)

    def say(self) -> None:
        """Log the steps that were reported and not logged yet."""
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        steps, self._steps = self._steps, BadSteps()
        for one in steps.views:
            key = one.generation, one.step, one.action
            if key not in self._told:
                self._told.add(key)
                hint = "" if self._skipped or one.action not in LEAVES_OUT else _HINT
                self._skipped = self._skipped or bool(hint)
                self._say(f"{words.bad_step(one)}{hint}")


_HINT = "; `torchelastic skipped` prints the samples of all ranks"
