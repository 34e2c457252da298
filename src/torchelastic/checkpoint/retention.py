"""Which checkpoints are removed when a new one is there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Dated(Protocol):
    """A checkpoint, as far as it matters here."""

    @property
    def step(self) -> int | None: ...


T = TypeVar("T", bound=Dated)


def removable(
    newest_first: Sequence[T], *, keep_last: int | None, keep_every: int | None
) -> list[T]:
    """What goes: all but the last `keep_last`, and but those of every `keep_every`-th step.

    The caller hands in valid ones only: one that cannot be loaded must not count as kept. Without
    `keep_last` nothing goes. The newest never does.
    """
    if keep_last is None:
        return []
    return [one for one in newest_first[max(keep_last, 1) :] if not _is_marked(one, keep_every)]


def _is_marked(one: Dated, keep_every: int | None) -> bool:
    return keep_every is not None and one.step is not None and one.step % keep_every == 0
