"""`ElasticSampler`: each sample once an epoch, across changes of the world."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from torchelastic.data.order import Order
from torchelastic.data.progress import DataProgress, Position
from torchelastic.data.shares import every_nth, turns_left
from torchelastic.errors import ConfigError
from torchelastic.worker_counters import milestones


class ElasticSampler(DataProgress, Sampler[int]):
    """The samples of one epoch after another, split among the ranks of the current world.

    The order of an epoch depends on its number, the seed and the length of the dataset, not on the
    world. The state is (seed, epoch, samples consumed), the same on all ranks. It advances when a
    step is committed; as the part `sampler` of a TorchState that is automatic.

    Use it with `torchelastic.data.DataLoader`, which follows changes of the world and roll-backs.

    With torch's own DataLoader it works like DistributedSampler: it yields this rank's samples for
    the rest of the epoch, the same number on every rank, padded with samples that come twice
    (`drop_last` drops the rest instead); `set_epoch` moves to the next epoch. After a change of the
    world, or after a step was undone, create a new iterator of the loader. Call
    `sampler.took(batch_size * world_size)` before each commit, because the sampler cannot know how
    many samples a step took.

    `rank` and `size` default to those of the default process group, else of the environment.
    """

    def __init__(
        self,
        data: Sized | int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(seed=seed, shuffle=shuffle, rank=rank, size=size)
        self.length = data if isinstance(data, int) else len(data)
        self.drop_last = drop_last
        self._order: tuple[tuple[int, int], Order] | None = None
        #: Samples were yielded since the last `took`.
        self._untold = False
        #: The jump count and the epoch of the last iterator.
        self._iterated: tuple[int, int] | None = None

    @property
    def order(self) -> Order:
        """The order of the current epoch."""
        key = self.seed, self.epoch
        if self._order is None or self._order[0] != key:
            self._order = key, Order(self.length, *key, shuffle=self.shuffle)
        return self._order[1]

    def took(self, samples: int) -> None:
        """Count `samples` of all ranks as taken. torchelastic's DataLoader does this itself."""
        if samples < 1:
            raise ConfigError(f"samples is {samples}: a step takes at least 1.")
        position = self.position
        self._handed = Position(position.epoch, min(self.length, position.consumed + samples))
        self._untold = False

    def committed(self) -> None:
        if self._untold:
            raise ConfigError(
                "A step was committed, but the sampler does not know how many samples it took: use "
                "torchelastic.data.DataLoader, or call sampler.took(samples of all ranks) first."
            )
        super().committed()
        milestones.samples = self.epoch * self.length + self.consumed

    def __iter__(self) -> Iterator[int]:
        place = self.turn, self.epoch
        if self._iterated == place and self.length and not len(self):
            raise ConfigError(
                f"Epoch {self.epoch} has no samples left: call sampler.set_epoch(epoch) before "
                "each epoch, or use torchelastic.data.DataLoader."
            )
        self._iterated = place
        self._untold = True
        return self._samples(self.turn)

    def _samples(self, turn: int) -> Iterator[int]:
        order, (rank, size) = self.order, self.world()
        positions = every_nth(self.consumed, self.length, rank, size, drop_last=self.drop_last)
        for position in positions:
            if self.turn != turn:
                raise RuntimeError(
                    "The sampler moved to another position after this iterator was created: create "
                    "a new iterator, or use torchelastic.data.DataLoader, which follows."
                )
            self._untold = True
            yield order.at(position, position + 1)[0]

    def __len__(self) -> int:
        """The number of samples that a new iterator would yield."""
        size = self.world().size
        return turns_left(self.consumed, self.length, size, drop_last=self.drop_last)

    def _form(self) -> dict[str, Any]:
        return {"length": self.length, "shuffle": self.shuffle}
