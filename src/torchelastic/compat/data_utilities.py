"""0.1's `utils.data`: a sampler that continues in the middle of an epoch, and several epochs as one
iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from torch.utils.data.distributed import DistributedSampler

from torchelastic.data.order import Order
from torchelastic.data.shares import every_nth, turns_left


class ElasticDistributedSampler(DistributedSampler[Any]):
    """This rank's share of the rest of an epoch.

    `start_index` is the number of samples of the epoch that all ranks have taken, in its order. The
    order depends on `set_epoch` alone, not on the world: each sample comes once, whatever the world
    sizes. (0.1 used `start_index` as an offset in the dataset: after a resize some samples came
    twice and others never.) The end is padded, so that all ranks have the same number.

    `start_index` is for the first epoch only: the next one, after `set_epoch`, starts at 0.
    `torchelastic.data.ElasticSampler` counts by itself and does not pad.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        # torch's class says Dataset; all it asks of one is its length.
        super().__init__(dataset, num_replicas=num_replicas, rank=rank)  # type: ignore[arg-type]
        self._dataset_size = len(dataset)
        if not 0 <= start_index <= self._dataset_size:
            raise ValueError(
                f"start_index is {start_index}, but the dataset has {self._dataset_size} samples: "
                "it counts the samples of this epoch only."
            )
        self.start_index = start_index
        self._begun = False
        self._share_out()

    def set_epoch(self, epoch: int) -> None:
        if self._begun and epoch != self.epoch:
            self.start_index = 0
            self._begun = False
            self._share_out()
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        self._begun = True
        order = Order(self._dataset_size, self.seed, self.epoch)
        positions = every_nth(
            self.start_index, self._dataset_size, self.rank, self.num_replicas, drop_last=False
        )
        return (order.at(position, position + 1)[0] for position in positions)

    def _share_out(self) -> None:
        """torch's names: samples for each rank, and for all ranks, filled up."""
        self.num_samples = turns_left(
            self.start_index, self._dataset_size, self.num_replicas, drop_last=False
        )
        self.total_size = self.num_samples * self.num_replicas


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
