"""Timers that the worker's own agent looks after: what `torchelastic run` gives every worker.

Nothing is made before a worker's first timer: then its table, and the one message that hands it to
the agent. From then on a timer costs no system call.
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
from torchelastic.timer.timer_requests import TimerClient, check_monotonic
from torchelastic.timer.timer_table import MESSAGE, STACKS_AT, Table
from torchelastic.worker import channel

#: At this signal, the agent's last word, the worker writes its stacks behind the table. Of the
#: real-time signals, which programs have no other use for.
STACKS_SIGNAL = signal.SIGRTMIN + 7


class AgentTimerClient(TimerClient):
    """Writes into a table that the agent reads."""

    def __init__(self, table: Table) -> None:
        self._table = table
        #: The timers acquired by name, and not by `start`.
        self._rows: dict[str, list[int]] = {}
        #: Not in a forked child, which shares the memory: it must not clear its parent's timers.
        self._ours = True

    def start(self, scope_id: str, after: float) -> Callable[[], None]:
        return partial(self._clear, self._set(scope_id, after, time.monotonic() + after))

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        check_monotonic(expiration_time)
        row = self._set(scope_id, expiration_time - time.monotonic(), expiration_time)
        self._rows.setdefault(scope_id, []).append(row)

    def release(self, scope_id: str) -> None:
        rows = self._rows.get(scope_id)
        if rows:
            self._clear(rows.pop())

    def disown(self) -> None:
        """In a forked child: the timers are the parent's."""
        self._ours = False

    def _set(self, scope: str, after: float, expires_at: float) -> int:
        if not self._ours:
            raise RuntimeError(_CHILD)
        return self._table.set(scope, after, expires_at)

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

_client: AgentTimerClient | None = None
_connecting = threading.Lock()


def connect() -> AgentTimerClient | None:
    """The client of this worker; None in a process that is no worker of an agent."""
    global _client
    if _client is None:
        with _connecting:
            _client = _client or _hand_over_a_table()
    return _client


def why_not() -> str:
    """Why there is no client, and what to do about it."""
    return _CHILD if env.get(channel.VARIABLE) else _UNCONFIGURED


def _hand_over_a_table() -> AgentTimerClient | None:
    link = channel.link()
    if link is None:
        return None
    table = Table()
    try:
        _write_stacks_at(STACKS_SIGNAL, table.descriptor)
        link.tell({"type": MESSAGE, "signal": int(STACKS_SIGNAL)}, [table.descriptor])
    except BaseException:
        faulthandler.unregister(STACKS_SIGNAL)
        table.close()
        raise
    finally:
        link.close()
    return AgentTimerClient(table)


def _write_stacks_at(signum: int, descriptor: int) -> None:
    """Have the stacks written at a signal: in C, whoever holds the GIL.

    The thread that gets the signal then stands still until the end. A system call it was hanging in
    would return otherwise, and what comes after would run until the worker is killed.
    """
    import ctypes  # not before it is needed: it takes milliseconds

    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signum, ctypes.cast(libc.pause, ctypes.c_void_p))
    os.lseek(descriptor, STACKS_AT, os.SEEK_SET)
    faulthandler.register(signum, descriptor, all_threads=True, chain=True)


def _forked() -> None:
    """A child has no agent; and a lock that another thread held would stay held here."""
    global _client, _connecting
    if _client is not None:
        _client.disown()
    _client, _connecting = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
