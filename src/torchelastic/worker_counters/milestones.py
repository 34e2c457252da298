"""Progress that the agent cannot see by itself: samples trained, micro-batches run, checkpoints in
storage, hashes of the weights.

The numbers go to the status page with every step (`worker.status_page`); a worker's bootstrap
listens for the rest and reports it to the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Samples of committed steps on all ranks; -1: not counted.
samples = -1
#: Micro-batches that this worker ran of its last step with `BatchPolicy.fixed`; -1: not counted.
micro_batches = -1

#: Called with a message for the agent (`worker.orders`), in the thread that has it.
Listener = Callable[[dict[str, Any]], object]

_listener: Listener | None = None
#: Called when the program returns.
_at_end: Callable[[], None] | None = None


def listen(listener: Listener) -> None:
    """Call `listener` for every message."""
    global _listener
    _listener = listener


def is_heard() -> bool:
    """Return whether anyone listens."""
    return _listener is not None


def checkpoint_stored(step: int, seconds: float, size: int) -> None:
    """Report that a checkpoint is in storage: the seconds it took to write, and its bytes. Called
    on one rank."""
    if _listener is not None:
        _listener({"type": "stored", "step": step, "seconds": seconds, "size": size})


def weights_hashed(step: int, sha256: str, *, final: bool = False) -> None:
    """Report the hash of the weights in a checkpoint or, `final`, at the end of the training.
    Called on one rank."""
    if _listener is not None:
        _listener({"type": "hashed", "step": step, "sha256": sha256, "final": final})


def at_end(call: Callable[[], None]) -> None:
    """Call this when the program returns: a script does not say when its training ends."""
    global _at_end
    _at_end = call


def ended() -> None:
    """The program returns."""
    if _at_end is not None:
        _at_end()
