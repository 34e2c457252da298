"""Timer requests: the interfaces of clients and request queues."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

#: The `expiration_time` of a request that releases a timer.
RELEASE = -1.0
#: Seconds. No timer runs for thirty years, but every wall clock time is that far ahead.
_ABSURD = 1e9


@dataclass
class TimerRequest:
    """A request to acquire a timer, or to release it if `expiration_time` is negative.

    `worker_id` identifies a worker to the client and the server.
    """

    worker_id: Any
    scope_id: str
    #: By `time.monotonic()`, which is the same for all processes of a machine.
    expiration_time: float


class TimerClient(ABC):
    """Acquires and releases the timers of the worker it is used in."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Acquire a timer that kills this worker at `expiration_time` (`time.monotonic()`)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release the timer of this scope; of several, the one acquired last."""

    def start(self, scope_id: str, after: float) -> Callable[[], None]:
        """Acquire a timer that expires after `after` seconds; return the function to release it."""
        self.acquire(scope_id, time.monotonic() + after)
        return partial(self.release, scope_id)


class RequestQueue(ABC):
    """The queue that a server reads requests from."""

    @abstractmethod
    def size(self) -> int:
        """The number of requests now; `get` returns at least that many, if asked for them."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests; wait for at most `timeout` seconds."""

    def wake(self) -> None:  # noqa: B027
        """Make a waiting `get` return, if possible, because the server stops."""


def check_monotonic(expiration_time: float) -> None:
    """Refuse a wall clock time, as in 0.2: such a timer would never expire."""
    if expiration_time > time.monotonic() + _ABSURD:
        raise ValueError(
            f"expiration_time {expiration_time:.0f} is a wall clock time, but timers use the "
            "monotonic clock: pass time.monotonic() + seconds."
        )
