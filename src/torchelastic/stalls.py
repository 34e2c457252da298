"""How long the training thread of this process has stood still, and what for.

Whoever makes it wait says so here. There is no lock: at worst two threads that say so at once lose
what one of them said. With every step the numbers go to the slate (`worker.slate`), where the agent
reads them.
"""

from __future__ import annotations

import time
from array import array

#: Waiting for the next batch; for a checkpoint to be copied; for a snapshot to be copied; for the
#: state to go on from.
KINDS = ("data", "checkpoint", "snapshot", "restore")

_PLACES = {kind: place for place, kind in enumerate(KINDS)}

#: Seconds since the process was started, in the order of `KINDS`.
seconds = array("d", [0.0] * len(KINDS))


def add(kind: str, stalled: float) -> None:
    """So many seconds more."""
    seconds[_PLACES[kind]] += stalled


class Counted:
    """`with Counted("data"):` counts what is done inside. Costs less than a microsecond."""

    __slots__ = ("_began", "_kind")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        add(self._kind, time.monotonic() - self._began)
