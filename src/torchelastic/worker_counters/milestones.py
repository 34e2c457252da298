"""What this process achieves and its agent cannot see: samples trained, checkpoints in storage.

Whoever achieves it says so here. The number of samples goes to the slate with every step
(`worker.status_page`); a worker's bootstrap listens for checkpoints and tells the agent.
"""

from __future__ import annotations

from collections.abc import Callable

#: Samples that all ranks together have trained with, as far as is committed; -1: nobody counts.
samples = -1

#: Is told the step, how many seconds it took, and the bytes.
Listener = Callable[[int, float, int], None]

_listener: Listener | None = None


def listen(listener: Listener) -> None:
    """Have this told of every checkpoint, in the thread that has written it."""
    global _listener
    _listener = listener


def checkpoint_stored(step: int, seconds: float, size: int) -> None:
    """A checkpoint of so many steps is in storage. Said on one rank."""
    if _listener is not None:
        _listener(step, seconds, size)
