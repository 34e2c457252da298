"""Leave a scheduler's signals to the agent.

Slurm sends SIGTERM to every process of a step, workers included. A worker that can save its state
before its node leaves must not die by it: the agent has the signal, too, and tells the worker what
to do.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchelastic import env

#: Names of the signals that workers get, too; set by the agent.
VARIABLE = "TORCHELASTIC_SHARED_SIGNALS"


def ignore_while(is_told: Callable[[], bool]) -> dict[signal.Signals, object]:
    """Ignore the shared signals while `is_told` says that the agent tells this worker what to do.

    Returns the handlers before; a signal that the script handles itself is left to it, and so are
    all of them outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def handle(signum: int, frame: object) -> None:
        if not is_told():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    names = [name for name in env.get(VARIABLE).split(",") if name]
    free = [
        number
        for name in names
        if signal.getsignal(number := signal.Signals[name]) is signal.SIG_DFL
    ]
    for number in free:
        signal.signal(number, handle)
    return dict.fromkeys(free, signal.SIG_DFL)


@contextmanager
def left_to_agent(is_told: Callable[[], bool]) -> Iterator[None]:
    """`ignore_while` in this block."""
    before = ignore_while(is_told)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
