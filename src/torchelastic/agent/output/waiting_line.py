"""The waiting line: on a terminal, shows what the job waits for and counts down in place.

In a log file that would be a line every second; there the reporter logs it now and then.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from torchelastic.clock import Clock
from torchelastic.events import words

#: Seconds between two lines.
TICK = 1.0


class Screen(Protocol):
    """The part of `Console` used here."""

    @property
    def is_terminal(self) -> bool: ...

    def redraw(self, text: str) -> None:
        """Replace the drawn line; remove it if this is empty."""
        ...


def sentence(what: str, left: float | None) -> str:
    """`waiting for nodes: 1 of at least 4 joined; missing: node3; for 4 min 53 s more`."""
    if left is None:
        return what
    return f"{what}; for {words.seconds(left)} more" if left >= 1 else f"{what}; any moment now"


class WaitingLine:
    """Counts down by this machine's clock."""

    def __init__(self, screen: Screen, clock: Clock) -> None:
        self._screen = screen
        self._clock = clock
        self._what = ""
        self._until: float | None = None

    def show(self, what: str, timeout: float | None = None) -> bool:
        """Show `what` with a countdown of `timeout` seconds; False if there is no terminal."""
        if not self._screen.is_terminal:
            return False
        self._what = what
        self._until = None if timeout is None else self._clock.now() + timeout
        self._draw()
        return True

    def clear(self) -> None:
        """Remove the line."""
        if self._what:
            self._what = ""
            self._screen.redraw("")

    def _draw(self) -> None:
        left = None if self._until is None else max(0.0, self._until - self._clock.now())
        self._screen.redraw(sentence(self._what, left))

    async def run(self) -> None:
        """Redraw for as long as the agent runs."""
        while self._screen.is_terminal:
            await asyncio.sleep(TICK)
            if self._what:
                self._draw()
