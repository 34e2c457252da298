"""Timers that the worker's agent watches; `torchelastic run` provides them to every worker.

A worker's first timer creates its table and passes it to the agent in one message. From then on a
timer costs no system call.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from torchelastic import env
from torchelastic.timer.timer_table import MESSAGE, STACKS_AT, TimerTable
from torchelastic.worker import channel

#: At this signal, sent before the kill, the worker writes its stacks after the table. A real-time
#: signal, which programs do not use otherwise.
STACKS_SIGNAL = signal.SIGRTMIN + 7


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


_UNCONFIGURED = (
    "No timer server: start this script with `torchelastic run`, or call "
    "torchelastic.timer.configure with a client before the first `expires`."
)
_CHILD = (
    "Timers work in the worker, but not in a process that it started (this one): put `expires` "
    "into the worker, around the call that waits for this process (`next(batches)` for a loading "
    "process), or configure a LocalTimerClient here and a LocalTimerServer in the worker."
)

_client: AgentTimers | None = None
_connecting = threading.Lock()


def connect() -> AgentTimers | None:
    """Return the client of this worker; None in a process that is not a worker."""
    global _client
    if _client is None:
        with _connecting:
            _client = _client or _create_client()
    return _client


def why_not() -> str:
    """Explain why there is no client, and what to do about it."""
    return _CHILD if env.get(channel.VARIABLE) else _UNCONFIGURED


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
