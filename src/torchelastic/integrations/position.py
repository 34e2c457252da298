"""Where in an epoch a training is, and how to come back there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any


def batches_done(done: int, *, before: int, now: int, multiple: int = 1) -> int:
    """How many batches of an epoch are done, in a world of another size than did them.

    Frameworks deal samples out like cards, so that batch after batch the ranks together take the
    next ones of a common order. What is done is rounded down: samples that are not a whole batch of
    every rank of the new world are trained again, rather than not at all. `multiple` is how many
    batches make a step.
    """
    if before == now:
        return done
    whole = done * before // now
    return whole - whole % multiple


class Skip:
    """A batch sampler whose next pass begins in the middle; those after it are whole.

    `skipped` is called once the skipped batches are drawn, and before the first one that counts.
    The pass is lazy, as that of torch's samplers is: an order that is drawn at random is drawn at
    the same moment as in a pass that skips nothing.
    """

    def __init__(self, batches: Any, count: int, skipped: Callable[[], object]) -> None:
        self._batches, self._count, self._skipped = batches, count, skipped

    def __iter__(self) -> Iterator[Any]:
        # Not before it is begun: loaders with worker processes ask for a pass twice.
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
