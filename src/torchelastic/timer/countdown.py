"""`expires`: a time limit for a block of code; the worker is killed if it takes longer."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from torchelastic.timer import agent_timers

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.api import TimerClient

_configured: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the timer client of this process; not needed under `torchelastic run`."""
    global _configured
    _configured = timer_client


class expires(ContextDecorator):
    """`with expires(after=60):`, or `@expires(after=60)` on a function.

    If the block takes longer than `after` seconds, the worker is killed, and `scope` (by default
    the file and line) is reported as the cause. Timers may be nested, overlap, and run in any
    thread. With a client of torch's, a scope has one timer: a nested one replaces it.
    """

    def __init__(
        self, after: float, scope: str | None = None, client: TimerClient | None = None
    ) -> None:
        if not (math.isfinite(after) and after > 0):
            raise ValueError(f"after is {after}: it must be a number of seconds above 0.")
        self._after = after
        self._scope = _caller() if scope is None else scope
        self._client = client
        self._release: Callable[[], None] | None = None

    def __enter__(self) -> None:
        client = self._client or _configured
        if client is not None:
            client.acquire(self._scope, time.time() + self._after)
            self._release = partial(client.release, self._scope)
            return
        own = agent_timers.connect()
        if own is None:
            raise RuntimeError(agent_timers.why_not())
        self._release = own.start(self._scope, self._after)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        assert self._release is not None, "exited without having been entered"
        self._release()

    def _recreate_cm(self) -> expires:
        """Create a timer for every call of a decorated function: calls may overlap."""
        return expires(self._after, self._scope, self._client)


def _caller() -> str:
    """Return the file and line that create an `expires`."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}#{frame.f_lineno}"
