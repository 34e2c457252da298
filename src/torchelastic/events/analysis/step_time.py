"""Productive time by step, to know how much a roll-back loses; and when a step is overdue. Pure."""

from __future__ import annotations

from bisect import bisect_left

#: Points kept. Beyond that, every other older one is dropped: the cost of a roll-back far into the
#: past is then less exact.
_POINTS_LIMIT = 4096

#: A step is overdue after this many seconds, and this many times the usual.
OVERDUE_AFTER, OVERDUE_FACTOR = 10.0, 5.0


def is_overdue(waited: float, *, usual: float, gap: float) -> bool:
    """Whether a step takes so long that the job seems to hang; all in seconds.

    `gap` is the time between the last two steps that were seen: agents look less often in large
    worlds, and the longer a generation lasts.
    """
    return waited > max(OVERDUE_AFTER, OVERDUE_FACTOR * usual, 2 * gap)


class StepTime:
    """Points of (a step, the productive microseconds when it was entered); both only grow."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._micros: list[int] = []

    @property
    def last(self) -> int:
        """The furthest step so far; -1: none."""
        return self._steps[-1] if self._steps else -1

    def add(self, step: int, micros: int) -> None:
        """Add a step that was entered; roll back first if it was entered before."""
        if self._steps and step <= self._steps[-1]:
            return
        self._steps.append(step)
        self._micros.append(micros)
        if len(self._steps) > _POINTS_LIMIT:
            del self._steps[1 : _POINTS_LIMIT // 2 : 2], self._micros[1 : _POINTS_LIMIT // 2 : 2]

    def less(self, micros: int) -> None:
        """Remove time before the last point that turned out not to be productive."""
        if self._micros:
            self._micros[-1] -= micros

    def at(self, step: int) -> int | None:
        """Return the productive microseconds when a step was entered; None: it never was."""
        place = bisect_left(self._steps, step)
        if place == len(self._steps):
            return None
        if place == 0 or self._steps[place] == step:
            return self._micros[place]
        before, after = self._steps[place - 1], self._steps[place]
        begun, span = self._micros[place - 1], self._micros[place] - self._micros[place - 1]
        return begun + span * (step - before) // (after - before)

    def roll_back(self, step: int) -> None:
        """Forget what was done from this step on."""
        place = bisect_left(self._steps, step)
        del self._steps[place:], self._micros[place:]
