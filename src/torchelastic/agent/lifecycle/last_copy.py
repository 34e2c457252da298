"""Decide whether to kill a worker that does not leave a world that is over. Pure.

Killing it at once frees its node for the next world. But if no other worker can continue with its
state, steps that all ranks have finished would be lost: then the job waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
