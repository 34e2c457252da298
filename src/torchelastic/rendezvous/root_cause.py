"""Who failed first. Pure, and by causal order: no two machines' clocks are compared.

Failures are listed as they became known to the leader. That order is right but for one case: the
peers of a failing worker see their connections break and may report that before the worker itself
is done dying. A failure that looks like a broken connection therefore yields to one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.failure import Failure

#: What gloo, NCCL and the stores say when the other end is gone.
_BROKEN_CONNECTION = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh failed",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "NCCL error",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "failed to recv",
    "Application timeout caused pair closure",
)

_SIGTERM = -15


def is_consequence(failure: Failure) -> bool:
    """Whether the failure looks like the loss of somebody else."""
    if failure.exitcode == _SIGTERM and not failure.told:
        return True
    return any(sign in failure.message for sign in _BROKEN_CONNECTION)


def pick(failures: Sequence[Failure]) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure and, in order, those that fell because of it."""
    if not failures:
        return None, ()
    first = next((item for item in failures if not is_consequence(item)), failures[0])
    return first, tuple(item for item in failures if item is not first)
