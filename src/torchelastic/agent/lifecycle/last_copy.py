"""Decide whether to kill a worker that does not leave a world. Pure.

Killing it at once frees its node for the next world. But if no other worker can continue with its
state, steps that all ranks have finished would be lost: then the job waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchelastic.agent.lifecycle.in_process import InProcessState, Status


@dataclass(frozen=True, kw_only=True)
class LiveCopy:
    """The state held by a living worker."""

    #: The last world it was told to enter.
    generation: int
    #: The number of steps in it; None: it has no state yet.
    step: int | None
    #: Whether it has left that world.
    stopped: bool = False
    frozen: bool = False
    #: Whether it is about to be killed.
    doomed: bool = False


def is_usable(copy: LiveCopy, generation: int) -> bool:
    """True if the world after `generation` can continue from this copy."""
    if copy.step is None or copy.frozen or copy.doomed:
        return False
    return copy.generation > generation or (copy.generation == generation and copy.stopped)


def may_be_killed(
    own: LiveCopy, others: Iterable[LiveCopy], *, elsewhere: bool, waited: float, limit: float
) -> bool:
    """True if a worker that has not left its world for `waited` seconds may be killed.

    `others` are the workers of its node; `elsewhere` is True if another node has a usable copy.
    """
    if not own.step or waited >= limit:
        return True
    return elsewhere or any(is_usable(other, own.generation) for other in others)


def is_waited_for(
    state: InProcessState, shown: Mapping[int, tuple[int, int, float] | None]
) -> bool:
    """Return whether this node leaves, and the last step before that waits only for workers here
    that have announced long work, such as an evaluation: the others can repeat it without them.

    `shown` is the progress of the workers that train; its time is infinite in announced work. In
    the steps before the last one, other work may be a save. The leader lets a node leave only if
    another one has the state (`choosing`); of a sharded state, it may have only parts.
    """
    world = state.world
    if not state.leaving or world is None or world.after is None or world.replica:
        return False
    if state.node not in world.handing_over:
        return False
    behind = False
    for local_rank in state.having(Status.TRAINING):
        generation, step, at = shown.get(local_rank) or (-1, -1, 0.0)
        if generation != state.workers[local_rank].generation:
            return False
        if step < world.after and at != math.inf:
            return False  # it works on a step, or saves something
        behind |= step < world.after
    return behind
