"""Threads for what blocks and cannot be interrupted: left alone when nobody waits any longer.

A thread that is done serves again, so that a send costs no thread start; one that finds nothing to
do for a while ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

#: How long a thread without work stays, in seconds.
IDLE = 2.0

_Tasks = queue.SimpleQueue[Callable[[], None]]

#: The threads without work, by what they wait on. `pop` and `remove` decide who has one.
_idle: list[_Tasks] = []


def run(task: Callable[[], None]) -> None:
    """Run `task` in a thread of its own, at once. It must not raise."""
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
            continue  # somebody has just taken us: a task is on its way
        task()
        del task  # it may hold the last reference to a group
        _idle.append(tasks)


def _retired(tasks: _Tasks) -> bool:
    try:
        _idle.remove(tasks)
    except ValueError:
        return False
    return True
