"""Tasks that run beside a loop: `TaskSet` has those of one owner, `SideTasks` those of a node, with
the policy for their failures."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from torchelastic import backoff
from torchelastic.best_effort import described
from torchelastic.errors import TorchElasticError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Restarts of a failing task before its failure ends the node.
ESSENTIAL, RESTARTABLE, BEST_EFFORT = 0, 5, math.inf

#: Every task by its name. Essential tasks make decisions or run the training; best-effort tasks
#: observe, report or warm up.
POLICY: dict[str, float] = {
    # Membership.
    "join": ESSENTIAL,
    "rejoin": ESSENTIAL,
    "membership": ESSENTIAL,
    "leader": ESSENTIAL,
    "watch-place": ESSENTIAL,
    "watch-world": ESSENTIAL,
    "watch-leader": ESSENTIAL,
    "watch-confirmed": ESSENTIAL,
    "watch-lease": ESSENTIAL,
    "doubt": ESSENTIAL,
    "probe": ESSENTIAL,
    "witness": BEST_EFFORT,  # this only watches it; votes are requested elsewhere
    # Workers.
    "preflight": ESSENTIAL,
    "warm-up": BEST_EFFORT,  # without a zygote, workers start as plain processes
    "action": ESSENTIAL,
    "standby": ESSENTIAL,
    "leave": ESSENTIAL,
    "preemption": BEST_EFFORT,
    "listen": ESSENTIAL,
    "renew-store": ESSENTIAL,
    "store-host": RESTARTABLE,
    "zygote": BEST_EFFORT,  # tried a few times; until then, workers start as plain processes
    "snapshot-copies": BEST_EFFORT,
    # Hang detection.
    "hang-watchdog": BEST_EFFORT,
    "timers": BEST_EFFORT,
    # Observability.
    "waiting-line": BEST_EFFORT,
    "inspection-socket": BEST_EFFORT,
    "sampling": BEST_EFFORT,
    "event-shipping": BEST_EFFORT,
    "metrics": BEST_EFFORT,
    "health": BEST_EFFORT,
    "dashboard": BEST_EFFORT,
}

#: Seconds before the first restart, and at most. They double until a task runs `STEADY` seconds.
FIRST_PAUSE, LONGEST_PAUSE, STEADY = 1.0, 60.0, 120.0

#: Seconds after which a task that is still running is cancelled again, longer than any takes to
#: end. Before Python 3.12, `asyncio.wait_for` ignores a cancellation at the moment of its result.
CANCEL_AGAIN = 10.0

#: Creates the coroutine for each start.
Work = Callable[[], Coroutine[Any, Any, Any]]


def pause(failures: int) -> float:
    """Seconds before a task is restarted that has failed `failures` times in a row.

    >>> [pause(failures) for failures in (1, 2, 3, 100)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return backoff.pause(failures, FIRST_PAUSE, LONGEST_PAUSE)


async def keep_up(work: Work, name: str, say: Callable[[str], None]) -> Any:
    """Run `work` and restart it when it fails, as often as `POLICY` allows; `say` reports it once.

    Raises the error of the last attempt, or the number of attempts.
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


class TaskSet:
    """The running tasks of one owner, oldest first, which are cancelled together. The event loop
    keeps only weak references to tasks."""

    def __init__(self, on_error: Callable[[Exception], None] | None = None) -> None:
        """`on_error` receives the error of each task that fails; None: asyncio logs it."""
        self._on_error = on_error
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return self.add(asyncio.create_task(work, name=name))

    def add(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keep a task until it ends."""
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self._on_error is not None and not task.cancelled():
            error = task.exception()
            if isinstance(error, Exception):  # the loop itself raises the others
                self._on_error(error)

    def cancel(self) -> None:
        """Cancel all of them, without waiting."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all of them and wait for their end; ignore what they raise."""
        tasks = list(self._tasks)
        while running := [task for task in tasks if not task.done()]:
            self.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN)
        await asyncio.gather(*tasks, return_exceptions=True)


class SideTasks:
    """The running tasks; `on_error` receives the error that ends the node."""

    def __init__(
        self,
        on_error: Callable[[Exception], None],
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        """`say` reports, once, a task that fails and is restarted."""
        self._say = say
        self._tasks = TaskSet(on_error)

    def start(self, work: Work, name: str) -> asyncio.Task[Any]:
        """Start a task of the table `POLICY`."""
        assert name in POLICY, f"{name} is missing in POLICY"
        return self._tasks.start(keep_up(work, name, self._say), name)

    async def cancel(self) -> None:
        """Cancel all of them; ignore what they raise."""
        await self._tasks.close()
