"""Progress that the agent cannot see by itself: samples trained, checkpoints in storage.

The number of samples goes to the status page with every step (`worker.status_page`); a worker's
bootstrap listens for checkpoints and reports them to the agent.
"""

from __future__ import annotations

from collections.abc import Callable

#: Samples of committed steps on all ranks; -1: not counted.
samples = -1

#: Called with the step, the seconds it took to write, and the size in bytes.
Listener = Callable[[int, float, int], None]

_listener: Listener | None = None


def listen(listener: Listener) -> None:
    """Call `listener` for every checkpoint, in the thread that has written it."""
    global _listener
    _listener = listener


def checkpoint_stored(step: int, seconds: float, size: int) -> None:
    """Report that a checkpoint is in storage. Called on one rank."""
    if _listener is not None:
        _listener(step, seconds, size)
