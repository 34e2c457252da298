"""The position of a training in an epoch, and how to return to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any


def batches_done(done: int, *, before: int, now: int, multiple: int = 1) -> int:
    """Convert the number of batches done in an epoch to another world size.

    Frameworks deal out samples round-robin, so that batch after batch all ranks take the next ones
    of a common order. The result is rounded down: samples that do not fill a batch on every rank of
    the new world are trained again, rather than not at all. `multiple` is the number of batches per
    step.
    """
    if before == now:
        return done
    whole = done * before // now
    return whole - whole % multiple


class Skip:
    """A batch sampler whose next pass starts in the middle; later passes are complete.

    `skipped` is called after the skipped batches are drawn, before the next one. The pass is lazy,
    like that of torch's samplers: a random order is drawn at the same moment as in a complete pass.
    """

    def __init__(self, batches: Any, count: int, skipped: Callable[[], object]) -> None:
        self._batches, self._count, self._skipped = batches, count, skipped

    def __iter__(self) -> Iterator[Any]:
        # Only when the pass starts: loaders with worker processes ask for an iterator twice.
        count, self._count = self._count, 0
        batches = iter(self._batches)
        if count:
            for _ in islice(batches, count):
                pass
            self._skipped()
        yield from batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
