"""How long the training thread of this process has stood still, and what for.

And with it: how long it has waited for other workers, and was at something that is no part of a
step. What is left of a step is the worker's own time, and tells who is slow (`events.stragglers`).

Whoever makes it wait says so here. There is no lock: at worst two threads that say so at once lose
what one of them said. With every step the numbers go to the status page (`worker.status_page`),
where the agent reads them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

#: Waiting for the next batch; for a checkpoint to be copied; for a snapshot to be copied; for the
#: state to go on from.
KINDS = ("data", "checkpoint", "snapshot", "restore")

#: Waiting for other workers; at something that may take any time, an evaluation for example.
PEERS, ASIDE = "peers", "aside"
COUNTED = (*KINDS, PEERS, ASIDE)

_PLACES = {kind: place for place, kind in enumerate(COUNTED)}
#: All but data, which a worker gets or does not get by itself.
_APART = slice(1, None)

#: Seconds since the process was started, in the order of `COUNTED`.
seconds = array("d", [0.0] * len(COUNTED))


def add(kind: str, stalled: float) -> None:
    """So many seconds more."""
    seconds[_PLACES[kind]] += stalled


def apart(counted: Sequence[float]) -> float:
    """Of seconds in the order of `COUNTED`: those that were not a worker's own in its steps."""
    return sum(counted[_APART])


class Counted:
    """`with Counted("data"):` counts what is done inside. Costs less than a microsecond."""

    __slots__ = ("_began", "_kind")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        add(self._kind, time.monotonic() - self._began)
