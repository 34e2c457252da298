"""Threads for calls that block and cannot be interrupted; abandoned when no one waits for them.

A finished thread is reused, so that a send does not start a thread; an idle thread ends after a
while.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

#: How long an idle thread stays, in seconds.
IDLE = 2.0

_Tasks = queue.SimpleQueue[Callable[[], None]]

#: The idle threads, by the lock they wait on. `pop` and `remove` decide who gets one.
_idle: list[_Tasks] = []


def run(task: Callable[[], None]) -> None:
    """Run `task` in a separate thread, at once. It must not raise."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        # A daemon: an operation that never ends must not keep the process from ending.
        thread = threading.Thread(
            target=_serve, args=(tasks,), name="torchelastic-group", daemon=True
        )
        thread.start()
    tasks.put(task)


def _serve(tasks: _Tasks) -> None:
    while True:
        try:
            task = tasks.get(timeout=IDLE)
        except queue.Empty:
            if _retired(tasks):
                return
            continue  # just taken: a task is on its way
        task()
        del task  # it may hold the last reference to a group
        _idle.append(tasks)


def _retired(tasks: _Tasks) -> bool:
    try:
        _idle.remove(tasks)
    except ValueError:
        return False
    return True
