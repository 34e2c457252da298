"""Tasks that run beside a node's loop, and what the failure of each of them costs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from torchelastic.best_effort import described
from torchelastic.errors import TorchElasticError

logger = logging.getLogger(__name__)

#: How often a task that fails is started again before its failure ends the node.
ESSENTIAL, RESTARTABLE, BEST_EFFORT = 0, 5, math.inf

#: Every task by its name. Essential is what decides or carries the training; best effort is what
#: looks, tells or warms up.
POLICY: dict[str, float] = {
    # This node among the others.
    "join": ESSENTIAL,
    "rejoin": ESSENTIAL,
    "membership": ESSENTIAL,
    "leader": ESSENTIAL,
    "watch-world": ESSENTIAL,
    "watch-leader": ESSENTIAL,
    "watch-settled": ESSENTIAL,
    "watch-lease": ESSENTIAL,
    "doubt": ESSENTIAL,
    "witness": BEST_EFFORT,  # it is only looked at: it is asked when it decides
    # Its workers.
    "preflight": ESSENTIAL,
    "warm-up": BEST_EFFORT,  # without a zygote, workers start as plain processes
    "action": ESSENTIAL,
    "standby": ESSENTIAL,
    "leave": ESSENTIAL,
    "listen": ESSENTIAL,
    "renew-store": ESSENTIAL,
    "store-host": RESTARTABLE,
    "zygote": BEST_EFFORT,  # tried a few times; until then, workers start as plain processes
    "snapshot-copies": BEST_EFFORT,
    # Who hangs.
    "hang-watchdog": BEST_EFFORT,
    "script-watchdog": BEST_EFFORT,
    "timers": BEST_EFFORT,
    # What people and programs see.
    "waiting-line": BEST_EFFORT,
    "inspection-socket": BEST_EFFORT,
    "sampling": BEST_EFFORT,
    "event-shipping": BEST_EFFORT,
    "metrics": BEST_EFFORT,
    "dashboard": BEST_EFFORT,
}

#: Seconds before the first restart, and at most. They double, until a task has run for a while.
FIRST_PAUSE, LONGEST_PAUSE, STEADY = 1.0, 60.0, 120.0

#: Made anew for each start.
Work = Callable[[], Coroutine[Any, Any, Any]]


def pause(failures: int) -> float:
    """Seconds before a task is started again that has failed so many times in a row.

    >>> [pause(failures) for failures in (1, 2, 3, 100)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE)


async def keep_up(work: Work, name: str, say: Callable[[str], None]) -> Any:
    """Run `work` and start it again when it fails, as often as `POLICY` allows; `say` is told once.

    Raises what the last attempt failed with, or how many there were.
    """
    allowed, failures, said = POLICY[name], 0, False
    while True:
        began = time.monotonic()
        try:
            return await work()
        except Exception as error:
            failures = 1 if time.monotonic() - began > STEADY else failures + 1
            if failures > allowed:
                if not allowed:
                    raise
                raise TorchElasticError(
                    f"{name} failed {failures} times in a row, and this node cannot train without "
                    f"it. Last error: {described(error)}."
                ) from error
            effect = "Training is not affected." if allowed == BEST_EFFORT else ""
            if not said:
                again = f"It restarts in {pause(failures):g} s. {effect}".rstrip()
                say(f"{name} failed: {described(error)}. {again}")
                said = True
            logger.debug("%s failed", name, exc_info=True)
            await asyncio.sleep(pause(failures))


class SideTasks:
    """Tasks under way; `on_error` is told what ends the node."""

    def __init__(
        self,
        on_error: Callable[[Exception], None],
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        """`say` is told, once, of a task that fails and is started again."""
        self._on_error = on_error
        self._say = say
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Work, name: str) -> asyncio.Task[Any]:
        """Start a task of the table `POLICY`."""
        assert name in POLICY, f"{name}: decide in POLICY what its failure costs"
        task = asyncio.create_task(keep_up(work, name, self._say), name=name)
        self._tasks.add(task)  # the loop itself keeps no more than a weak reference
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # the loop itself raises the others
            self._on_error(error)

    async def cancel(self) -> None:
        """End all of them; whatever they raise now is of no interest any more."""
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
