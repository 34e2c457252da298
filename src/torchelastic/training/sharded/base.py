"""The version that a world of replicas goes on from. Pure.

A step ends with one all-reduce of all workers, before anything is written. It can succeed on some
workers and be aborted on others. Workers on which it succeeded commit the step. The others have all
their gradients, since every worker had entered it: such a worker is *ready*, and can complete the
step alone. So if any worker has committed a step, every other living worker has it or can complete
it: a part is lost only if all workers that have it are.

A state that was received keeps its version until the next step. Otherwise, if workers of another
part were interrupted while they received theirs, no version would have all its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.training.state.state import TORN, Version


def base_of(versions: Sequence[Version], ready: Sequence[int], replica: int) -> Version:
    """Return the freshest version of which some worker has each part; TORN if there is none.

    By rank: the versions of the workers, and the generation whose step each is ready to complete,
    or -1. A worker's part is its rank modulo the size of a `replica`.
    """
    after = versions_after(versions, ready)
    for version in sorted(set(versions), reverse=True):
        parts = {
            rank % replica
            for rank in range(len(versions))
            if version in (versions[rank], after[rank])
        }
        if len(parts) == replica and version != TORN:
            return version
    return TORN


def versions_after(versions: Sequence[Version], ready: Sequence[int]) -> list[Version]:
    """Return, by rank, the version that each worker has or can complete."""
    return [
        (generation, version[1] + 1) if generation >= 0 else version
        for version, generation in zip(versions, ready, strict=True)
    ]


def missing_parts(versions: Sequence[Version], version: Version, replica: int) -> list[int]:
    """Return the parts of a version that no worker has."""
    found = {rank % replica for rank, one in enumerate(versions) if one == version}
    return [part for part in range(replica) if part not in found]
