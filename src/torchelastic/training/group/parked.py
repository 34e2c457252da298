"""Parked groups: held until gloo is done with them, then dropped in a separate thread.

Dropping gloo's object joins its threads. One of them may be stuck in a send to a lost peer until
the group's timeout, and the connections of a group that was left cleanly may still carry data that
another rank is about to read. So groups are parked, and a thread drops them later. It exists only
while groups are parked.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import socket
import threading
import time
from typing import Any, NamedTuple

from torchelastic.training.group.abortable_waits import Waits

log = logging.getLogger(__name__)

#: How long the connections of a cleanly left group stay open for the other ranks, in seconds.
GRACE = 1.0
#: How long the end of the process waits for the threads of groups, in seconds: rank 0, and how much
#: longer each next rank does. A thread that is stuck in spite of an abort is freed when its peer's
#: process ends. If all ranks stopped waiting at the same time, their threads would be freed while
#: Python shuts down, which aborts the process (`_end`).
LAST, APART, APART_RANKS = 1.0, 1.5, 8
#: How often the reaper looks, in seconds: at first, and when nothing has changed for long.
_SOON, _SELDOM = 0.05, 2.0


class _Parked(NamedTuple):
    """The gloo objects of one world."""

    gloos: list[Any]
    waits: Waits
    silent: list[socket.socket]
    rank: int
    since: float
    aborted: bool

    def is_done(self, now: float) -> bool:
        """Return whether no operation is running and no rank can need the connections."""
        if self.waits.pending:
            return False
        return self.aborted or _ending or now - self.since > GRACE

    def drop(self) -> None:
        """Drop gloo, which joins its threads without holding the GIL."""
        self.gloos.clear()
        for listener in self.silent:
            listener.close()


_lock = threading.Lock()
#: Held while groups are dropped. At process exit it is taken for good: no more are dropped.
_dropping = threading.Lock()
#: The process is ending, and its connections with it: do not wait for other ranks any more.
_ending = False
_parked: list[_Parked] = []
_wake = threading.Event()
_reaper: threading.Thread | None = None


def park(
    gloos: list[Any], waits: Waits, *, silent: list[socket.socket], rank: int, aborted: bool
) -> None:
    """Hold these groups until they can be dropped, then drop them."""
    if not gloos:
        return
    with _lock:
        _parked.append(_Parked(gloos, waits, silent, rank, time.monotonic(), aborted))
        if _reaper is None:
            _start_reaper()
    _wake.set()


def _start_reaper() -> None:
    global _reaper
    thread = threading.Thread(target=_reap, name="torchelastic-reaper", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("Groups of earlier worlds stay open until the next one ends: %s.", error)
    else:
        _reaper = thread


def parked() -> int:
    """Return the number of worlds with parked groups."""
    return len(_parked)


def _reap() -> None:
    """Drop parked groups until none are left."""
    period = _SOON
    while not _is_over():
        period = _SOON if _wake.wait(period) else min(2 * period, _SELDOM)
        _wake.clear()
        with _dropping:
            dropped = _drop_done()
        if dropped or _ending:
            period = _SOON


def _is_over() -> bool:
    global _reaper
    with _lock:
        if not _parked:
            _reaper = None
        return not _parked


def _drop_done() -> int:
    """Drop groups that are done; return how many. They stay listed until they are gone."""
    now = time.monotonic()
    done = [entry for entry in _parked if entry.is_done(now)]
    for entry in done:
        entry.drop()
    with _lock:
        for entry in done:
            _parked.remove(entry)
    return len(done)


@atexit.register
def _end() -> None:
    """Join gloo's threads while the interpreter lives; stuck ones are never dropped.

    If a thread asks for the GIL later, to report the end of an operation or to return from a drop,
    Python ends it in the middle of C++ code, which is SIGABRT. So the silent peers of stuck threads
    stay open, too: closing one frees its thread.
    """
    global _ending
    _ending = True
    _wake.set()
    rank = next((entry.rank for entry in reversed(list(_parked))), 0)  # of the last world
    if (reaper := _reaper) is not None:
        reaper.join(LAST + APART * (rank % APART_RANKS))
    _dropping.acquire(timeout=LAST)  # not given back: from now on nothing is dropped
    for entry in list(_parked):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(entry))
