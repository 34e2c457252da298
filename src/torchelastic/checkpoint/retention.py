"""Retention: which checkpoints to remove after a new one is written. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Dated(Protocol):
    """A checkpoint with a step."""

    @property
    def step(self) -> int | None: ...


T = TypeVar("T", bound=Dated)


def removable(
    newest_first: Sequence[T], *, keep_last: int | None, keep_every: int | None
) -> list[T]:
    """Return all but the last `keep_last` and those of every `keep_every`-th step.

    Pass valid checkpoints only: one that cannot be loaded must not count as kept. Without
    `keep_last` nothing is removed. The newest is never removed.
    """
    if keep_last is None:
        return []
    return [one for one in newest_first[max(keep_last, 1) :] if not _is_marked(one, keep_every)]


def _is_marked(one: Dated, keep_every: int | None) -> bool:
    return keep_every is not None and one.step is not None and one.step % keep_every == 0
