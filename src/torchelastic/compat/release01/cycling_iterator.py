"""Several epochs as one iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class CyclingIterator(Generic[T]):
    """Yields the items of `generator_fn(epoch)` for each epoch from `start_epoch` to `n - 1`."""

    def __init__(
        self, n: int, generator_fn: Callable[[int], Iterable[T]], start_epoch: int = 0
    ) -> None:
        epochs = range(start_epoch, n)
        self._items = (item for epoch in epochs for item in generator_fn(epoch))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)
