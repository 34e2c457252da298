"""Who failed first. Pure, and by causal order: no two machines' clocks are compared.

Failures are listed as they became known to the leader. That order is right but for one case: the
peers of a failing worker see their connections break and may report that before the worker itself
is done dying. A failure that looks like somebody else's therefore yields to one that does not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torchelastic.failure import Failure

#: What gloo, NCCL and the stores say when the other end is gone. Compared in lower case.
_BROKEN_CONNECTION = (
    "lost a peer",
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "connectfullmesh failed",
    "application timeout caused pair closure",
    "timed out waiting",
    "failed to recv",
    "socket timeout",
    "nccl communicator was aborted",
    "nccl error",
    "ncclremoteerror",
    "collective operation timeout",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
)

_SIGABRT = -6
#: The agent's own stop; 143 is what a shell or a script's handler makes of it.
_STOPPED = (-15, 128 + 15)


class _Look(enum.IntEnum):
    """What a failure looks like, the likeliest cause first."""

    CAUSE = 0
    #: It may be a failed check of its own, or NCCL's watchdog giving up on a lost peer.
    ABORT_AMONG_BROKEN_CONNECTIONS = 1
    BROKEN_CONNECTION = 2
    STOPPED = 3


def is_consequence(failure: Failure) -> bool:
    """Whether the failure can be explained by the loss of somebody else."""
    return _look(failure, among_broken=True) is not _Look.CAUSE


def pick(failures: Sequence[Failure]) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure and, in order, those of its generation that fell because of it."""
    if not failures:
        return None, ()
    mates = [item for item in failures if item.generation == failures[0].generation]
    looks = []
    broken = False
    for item in mates:
        looks.append(_look(item, among_broken=broken))
        broken = broken or looks[-1] is _Look.BROKEN_CONNECTION
    first = mates[looks.index(min(looks))]
    return first, tuple(item for item in mates if item is not first)


def _look(failure: Failure, *, among_broken: bool) -> _Look:
    if failure.stopped or (failure.exitcode in _STOPPED and not failure.told):
        return _Look.STOPPED
    if any(sign in line for line in _said(failure) for sign in _BROKEN_CONNECTION):
        return _Look.BROKEN_CONNECTION
    if failure.exitcode == _SIGABRT and not failure.told and among_broken:
        return _Look.ABORT_AMONG_BROKEN_CONNECTIONS
    return _Look.CAUSE


def _said(failure: Failure) -> list[str]:
    """The message, and the errors it came from: those lines of a traceback are not indented.

    Indented ones are source code, which may speak of connections without any being broken.
    """
    chain = [line for line in failure.traceback.splitlines() if not line.startswith(" ")]
    return [text.lower() for text in (failure.message, *chain)]
