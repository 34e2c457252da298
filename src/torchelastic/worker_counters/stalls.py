"""Stalled time of the training thread, by cause.

Also counts the time it waited for other workers, or did something that is not part of a step. The
rest of a step is the worker's own time, which shows stragglers (`events.analysis.stragglers`).

Code that makes the training thread wait adds to it. There is no lock: at worst, of two concurrent
additions one is lost. With every step the numbers go to the status page (`worker.status_page`),
where the agent reads them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

#: Waiting for the next batch; for a checkpoint to be copied; for a snapshot to be copied; for the
#: state to continue from.
KINDS = ("data", "checkpoint", "snapshot", "restore")

#: Waiting for other workers; at something that may take any time, an evaluation for example.
PEERS, ASIDE = "peers", "aside"
COUNTED = (*KINDS, PEERS, ASIDE)

_PLACES = {kind: place for place, kind in enumerate(COUNTED)}
#: All but data: waiting for data is the worker's own time.
_APART = slice(1, None)

#: Seconds since the process was started, in the order of `COUNTED`.
seconds = array("d", [0.0] * len(COUNTED))


def add(kind: str, stalled: float) -> None:
    """Add stalled seconds."""
    seconds[_PLACES[kind]] += stalled


def apart(counted: Sequence[float]) -> float:
    """Sum the seconds that were not the worker's own, given in the order of `COUNTED`."""
    return sum(counted[_APART])


class Counted:
    """Counts the time of a block: `with Counted("data"):`. Costs less than a microsecond."""

    __slots__ = ("_began", "_kind")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        add(self._kind, time.monotonic() - self._began)
