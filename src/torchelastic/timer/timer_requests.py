"""What timers are asked for with: the client's side, and what it sends to a server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

#: The `expiration_time` of a request that releases a timer.
RELEASE = -1.0
#: Seconds. No timer runs for thirty years; but so far ahead is every wall clock time.
_ABSURD = 1e9


@dataclass
class TimerRequest:
    """One timer acquired, or released where `expiration_time` is negative.

    `worker_id` is whatever the client and the server at hand know a worker by.
    """

    worker_id: Any
    scope_id: str
    #: By `time.monotonic()`, which is the same for all processes of a machine.
    expiration_time: float


class TimerClient(ABC):
    """Acquires and releases the timers of the worker it is used in."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """From `expiration_time` on (`time.monotonic()`) this worker may be ended."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """The timer of this scope is no more; of several, the one acquired last."""

    def start(self, scope_id: str, after: float) -> Callable[[], None]:
        """Acquire a timer of `after` seconds from now; returns what releases that very one."""
        self.acquire(scope_id, time.monotonic() + after)
        return partial(self.release, scope_id)


class RequestQueue(ABC):
    """Where a server gets requests from."""

    @abstractmethod
    def size(self) -> int:
        """How many there are now; `get` returns at least so many, if asked for them."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests, waiting for them `timeout` seconds at most."""

    def wake(self) -> None:  # noqa: B027
        """Make a `get` that waits return, where that is possible: the server is to stop."""


def check_monotonic(expiration_time: float) -> None:
    """Refuse a wall clock time, as 0.2 had it: that timer would never expire."""
    if expiration_time > time.monotonic() + _ABSURD:
        raise ValueError(
            f"expiration_time {expiration_time:.0f} is a wall clock time, but timers use the "
            "monotonic clock: pass time.monotonic() + seconds."
        )
