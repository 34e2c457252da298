"""`expires`: a time limit for a block of code; the worker is killed if it takes longer.

The worker's agent watches the timers; `torchelastic run` provides them to every worker. A worker's
first timer creates its table and passes it to the agent in one message. From then on a timer costs
no system call. Without an agent, timers need a client of torch's.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.timer.timer_table import MESSAGE, STACKS_AT, TimerTable
from torchelastic.worker import channel

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.api import TimerClient

#: At this signal, sent before the kill, the worker writes its stacks after the table. A real-time
#: signal, which programs do not use otherwise.
STACKS_SIGNAL = signal.SIGRTMIN + 7

_UNCONFIGURED = (
    "No timer server: start this script with `torchelastic run`, or call "
    "torchelastic.timer.configure with a client before the first `expires`."
)
_CHILD = (
    "Timers work in the worker, but not in a process that it started (this one): put `expires` "
    "into the worker, around the call that waits for this process (`next(batches)` for a loading "
    "process), or configure a LocalTimerClient here and a LocalTimerServer in the worker."
)

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
        own = connect()
        if own is None:
            raise RuntimeError(_CHILD if env.get(channel.VARIABLE) else _UNCONFIGURED)
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


class AgentTimers:
    """The timers of this worker, in a table that the agent reads."""

    def __init__(self, table: TimerTable) -> None:
        self._table = table
        #: False in a forked child, which shares the memory and must not clear its parent's timers.
        self._ours = True

    def start(self, scope: str, after: float) -> Callable[[], None]:
        """Set a timer that expires after `after` seconds; return the function to clear it."""
        if not self._ours:
            raise RuntimeError(_CHILD)
        return partial(self._clear, self._table.set(scope, after, time.monotonic() + after))

    def disown(self) -> None:
        """Stop using the table in a forked child: the timers belong to the parent."""
        self._ours = False

    def _clear(self, row: int) -> None:
        if self._ours:
            self._table.clear(row)


_client: AgentTimers | None = None
_connecting = threading.Lock()


def connect() -> AgentTimers | None:
    """Return the client of this worker; None in a process that is not a worker."""
    global _client
    if _client is None:
        with _connecting:
            _client = _client or _create_client()
    return _client


def _create_client() -> AgentTimers | None:
    link = channel.link()
    if link is None:
        return None
    table = TimerTable()
    try:
        _write_stacks_at(STACKS_SIGNAL, table.descriptor)
        link.tell({"type": MESSAGE, "signal": int(STACKS_SIGNAL)}, [table.descriptor])
    except BaseException:
        faulthandler.unregister(STACKS_SIGNAL)
        table.close()
        raise
    finally:
        link.close()
    return AgentTimers(table)


def _write_stacks_at(signum: int, descriptor: int) -> None:
    """Write the stacks at a signal: in C, without the GIL.

    The thread that gets the signal then pauses until the kill. Otherwise a system call it was hung
    in would return, and the code after it would run until the worker is killed.
    """
    import ctypes  # not before it is needed: it takes milliseconds

    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signum, ctypes.cast(libc.pause, ctypes.c_void_p))
    os.lseek(descriptor, STACKS_AT, os.SEEK_SET)
    faulthandler.register(signum, descriptor, all_threads=True, chain=True)


def _forked() -> None:
    """Reset in a child: it has no agent, and a lock held by another thread would stay held."""
    global _client, _connecting
    if _client is not None:
        _client.disown()
    _client, _connecting = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
