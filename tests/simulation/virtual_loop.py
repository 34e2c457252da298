"""Event loops in virtual time: one for each simulated process, all run by one scheduler.

Time jumps to the next timer, nothing ever sleeps, and simultaneous events run in the order in which
they were scheduled: the same program runs in the same way every time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

#: Virtual seconds that a function in a thread takes.
THREAD_TIME = 0.001
#: The most attempts to cancel a task, and virtual seconds between them.
CANCELS_LIMIT, CANCEL_INTERVAL = 20, 0.1

Context = contextvars.Context


class Scheduler:
    """Virtual time, and everything that is scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Numbers tasks and futures: their order in a set must not depend on their addresses.
        self.numbers = itertools.count(1)
        self._order = itertools.count()
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        #: Runs everything outside the nodes: the network, and the faults.
        self.outside = VirtualLoop(self)  # type: ignore[abstract]

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call a function at a time, outside all nodes."""
        return self.outside.call_at(when, callback, *args)

    def close(self, loops: Iterable[VirtualLoop]) -> None:
        """Let all tasks of these loops end, so that none is destroyed while pending."""
        for _ in range(CANCELS_LIMIT):
            if not any([loop.cancel_all() for loop in loops]):
                return
            self.run_until(self.now + CANCEL_INTERVAL)

    def soon(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)

    def later(self, handle: asyncio.TimerHandle) -> None:
        heapq.heappush(self._timers, (handle.when(), next(self._order), handle))

    def run_until(self, end: float) -> None:
        """Run everything up to a time."""
        ready, timers = self._ready, self._timers
        running: VirtualLoop | None = None
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    loop: VirtualLoop = handle._loop  # type: ignore[attr-defined]
                    if handle.cancelled():
                        continue
                    if loop.held is not None:
                        loop.held.append(handle)
                        continue
                    if loop is not running:
                        _set_running_loop(loop)
                        running = loop
                    handle._run()
                if not timers or timers[0][0] > end:
                    break
                when, _, timer = heapq.heappop(timers)
                self.now = max(self.now, when)
                ready.append(timer)
        finally:
            _set_running_loop(None)
        self.now = max(self.now, end)


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. `network` makes its connections."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: The calls that a frozen or dead process does not run; None: it runs.
        self.held: list[asyncio.Handle] | None = None
        self._dead = False
        #: The context of callbacks that no code of the process scheduled.
        self.context = contextvars.copy_context()
        self.signal_handlers: dict[int, Callable[[], object]] = {}
        #: Uncaught exceptions.
        self.errors: list[str] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    # Freezing and ending

    def freeze(self) -> None:
        """Run nothing until it is thawed."""
        if self.held is None:
            self.held = []

    def thaw(self) -> None:
        """Continue: first with data that arrived, then with timers that have fired, in the order of
        `select`."""
        if self._dead or self.held is None:
            return
        held, self.held = self.held, None
        for handle in sorted(held, key=lambda one: isinstance(one, asyncio.TimerHandle)):
            self._scheduler.soon(handle)

    def end(self) -> None:
        """Stop running anything."""
        self._dead = True
        self.held = []

    def cancel_all(self) -> bool:
        """Cancel the tasks of a loop, ended or not; False if there is none."""
        self._dead, self.held = False, None
        for task in [*self._tasks]:
            task.cancel()
        return bool(self._tasks)

    # Called by asyncio

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._scheduler.soon(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._scheduler.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._scheduler.later(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: it is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self, next(self._scheduler.numbers))

    def create_task(self, coro: Any, *, name: str | None = None, **_: Any) -> asyncio.Task[Any]:
        task = _Task(coro, self, next(self._scheduler.numbers), name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run it at once, and deliver the answer a moment later."""
        future = self.create_future()

        def answer() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(THREAD_TIME, answer)
        return future

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        self.signal_handlers[sig] = lambda: callback(*args)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    def run_forever(self) -> NoReturn:
        raise NotImplementedError("the scheduler runs all loops")


class _Future(asyncio.Future[Any]):
    """A future whose hash is the same in every run."""

    def __init__(self, loop: VirtualLoop, number: int) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """A task whose hash is the same in every run."""

    def __init__(self, coro: Any, loop: VirtualLoop, number: int, name: str | None) -> None:
        self._number = number
        super().__init__(coro, loop=loop, name=name or f"Task-{number}")

    def __hash__(self) -> int:
        return self._number
