"""`DataLoader`: torch's DataLoader for a world that changes.

Its iterator returns one batch per step: this rank's share of the samples that all ranks take. It
tells the sampler which samples it handed out; samples that its workers only prefetched do not
count. Before each batch it checks whether the world has changed or the sampler was rolled back. If
so, it drops the prefetched batches and continues with the new shares.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.fixed_batch import FixedBatch
from torchelastic.data.own_rank import OwnRank
from torchelastic.data.progress import DataProgress, Handed, Position
from torchelastic.data.sampler import ElasticSampler
from torchelastic.data.shares import Plan, Policy
from torchelastic.data.streaming import CollateStep, ElasticStream, StreamFeed, StreamSteps
from torchelastic.errors import ConfigError
from torchelastic.tensors import rng
from torchelastic.worker_counters import stalls

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class Feed(Protocol):
    """Tells torch's loader what to load, and our iterator what was loaded.

    torch iterates it as `batch_sampler`, once for each of torch's iterators.
    """

    @property
    def progress(self) -> DataProgress: ...

    def begin(self, world: OwnRank) -> None:
        """Load for this world from now on, starting at the current progress."""

    def __iter__(self) -> Iterator[list[Any]]: ...

    def unfold(self, loaded: Any) -> tuple[Any, Handed, Position]:
        """Return a loaded batch, its samples, and the position after it."""

    @property
    def turn(self) -> int:
        """Counts changes of the shares in one world."""


class SampledFeed:
    """Sample numbers, for a map-style dataset."""

    def __init__(self, sampler: ElasticSampler, policy: Policy, *, drop_last: bool) -> None:
        self.progress, self._policy, self._drop_last = sampler, policy, drop_last
        self._plan = self.plan(OwnRank(0, 1))
        #: Batches requested or prefetched, in the order in which they come back.
        self._ahead: deque[Handed] = deque()

    def plan(self, world: OwnRank) -> Plan:
        """The rest of the epoch in this world."""
        sampler = self.progress
        return Plan(sampler.consumed, sampler.length, *world, self._policy, self._drop_last)

    def begin(self, world: OwnRank) -> None:
        self._plan = self.plan(world)

    @property
    def turn(self) -> int:
        return self._policy.turn

    def __iter__(self) -> Iterator[list[Any]]:
        self._ahead.clear()
        return self._load(self._plan)

    def _load(self, plan: Plan) -> Iterator[list[Any]]:
        order, epoch = self.progress.order, self.progress.epoch
        for number, share in enumerate(plan):
            begin, end = share.begin, share.end
            ids = to_load = order.at(share.start, share.stop)
            found = self._policy.to_load(plan.rank, plan.size, end - begin, is_next=number == 0)
            if found is not None:
                to_load, ids = (
                    [one for start, stop in spans for one in order.at(begin + start, begin + stop)]
                    for spans in found
                )
            self._ahead.append(Handed(epoch, plan.rank, plan.size, (begin, end), tuple(ids)))
            # A rank without a share gets a placeholder sample: the others wait for its collectives.
            to_load = to_load or order.at(begin, begin + 1)
            is_seeded = isinstance(self._policy, FixedBatch)
            yield [(epoch, one) for one in to_load] if is_seeded else to_load

    def unfold(self, loaded: Any) -> tuple[Any, Handed, Position]:
        handed = self._ahead.popleft()
        return loaded, handed, Position(handed.epoch, handed.span[1])

    def __len__(self) -> int:
        return len(self.plan(self.progress.world()))


class SeededDataset(Dataset[Any]):
    """A dataset whose samples are augmented in the same way wherever and whenever they are loaded:
    generators are seeded by (seed, epoch, sample)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        # A loading process has generators of its own.
        before = rng.capture() if get_worker_info() is None else None
        rng.seed(self._seed, *key)
        sample = self.dataset[key[1]]
        if before is not None:
            rng.restore(before)
        return sample

    def __len__(self) -> int:
        return len(self.dataset)


class ElasticBatches(Iterator[T]):
    """An iterator over the batches of an epoch, across changes of the world."""

    def __init__(self, loader: ElasticLoader[T]) -> None:
        self._loader = loader
        self._feed, self._progress = loader.feed, loader.feed.progress
        #: torch's iterator was made for these; it is dropped when any of them changes.
        self._world: OwnRank | None = None
        self._turn = self._turn_of_shares = -1
        self._place = Position()
        self._loaded: Iterator[Any] | None = None
        self._ended = False

    def __next__(self) -> T:
        began = time.monotonic()
        batch = self._next()
        stalls.add("data", time.monotonic() - began)
        return batch

    def _next(self) -> T:
        if not self._goes_on():
            self._begin()
        if self._ended:
            raise StopIteration
        # Unset during `next`: an iterator that raised an error has lost its place.
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        try:
            batch, handed, after = self._feed.unfold(next(loaded))
        except StopIteration:
            self._ended = True
            self._progress.end_epoch()
            raise
        self._progress.hand_out(handed, after)
        self._loader.handed = handed
        self._loaded, self._place = loaded, after
        return batch  # type: ignore[no-any-return]

    def _goes_on(self) -> bool:
        if self._turn != self._progress.turn:
            return False
        return self._ended or (
            self._loaded is not None
            and self._place == self._progress.position
            and self._world == self._progress.world()
            and self._turn_of_shares == self._feed.turn
        )

    def _begin(self) -> None:
        progress = self._progress
        same_epoch = self._place.epoch == progress.epoch
        # Another epoch without a jump: another iterator has reached the end of this one.
        self._ended = self._turn == progress.turn and not same_epoch
        self._turn, self._place, self._world = progress.turn, progress.position, progress.world()
        self._turn_of_shares = self._feed.turn
        self._loaded = None  # ends its workers before others are started
        if not self._ended:
            self._loaded = self._loader.load_from_here(self._world)


class ElasticLoader(Generic[T]):
    """Mixin that makes torch's DataLoader, or a subclass of it, elastic."""

    feed: Feed
    #: The samples of the latest batch; None before the first.
    handed: Handed | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: ElasticSampler | None = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        policy: BatchPolicy | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        if batch_sampler is not None:
            raise ConfigError("batch_sampler is not supported: pass batch_size or policy instead.")
        if not options.get("in_order", True):
            raise ConfigError(
                "in_order=False is not supported: batches are counted in their order."
            )
        shown = batch_size if policy is None else None
        policy = _policy(policy, batch_size)
        if isinstance(dataset, ElasticStream):
            _refuse_sampler(sampler, shuffle)
            if isinstance(policy, FixedBatch):
                raise ConfigError(
                    "BatchPolicy.fixed needs a dataset with a length and an ElasticSampler: the "
                    "samples of a micro-batch of an ElasticStream are not known beforehand."
                )
            steps = StreamSteps(dataset, policy, drop_last=drop_last or dataset.drop_last)
            self.feed, dataset = StreamFeed(dataset), steps
            collate_fn = CollateStep(collate_fn or default_collate)
        else:
            sampler = _sampler(dataset, sampler, shuffle)
            drop_last = drop_last or sampler.drop_last
            self.feed = SampledFeed(sampler, policy, drop_last=drop_last)
            if isinstance(policy, FixedBatch):
                dataset = SeededDataset(dataset, policy.seed)
        #: Without it torch draws from the global generator for each new iterator: a step done
        #: again would see other random numbers than the first time.
        self._own_generator = None if generator is not None else torch.Generator()
        super().__init__(  # type: ignore[call-arg]
            dataset,
            batch_sampler=self.feed,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            generator=generator or self._own_generator,
            **options,
        )
        # Frameworks look for these. torch's own `__setattr__` refuses to change them.
        object.__setattr__(self, "sampler", self.feed.progress)
        object.__setattr__(self, "batch_size", shown)

    @property
    def progress(self) -> DataProgress:
        """The position in the data: the sampler, or the stream."""
        return self.feed.progress

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss of the latest batch, before `backward`.

        1.0 while all ranks have the same number of samples, 0.0 for a placeholder batch. With it,
        DDP's mean over ranks is the mean over samples.
        """
        return self._latest().weight

    @property
    def total(self) -> int:
        """The number of samples of all ranks in the step of the latest batch."""
        return self._latest().total

    def _latest(self) -> Handed:
        if self.handed is None:
            raise RuntimeError("The loader has not returned a batch yet.")
        return self.handed

    def __iter__(self) -> Iterator[T]:
        return ElasticBatches(self)

    def load_from_here(self, world: OwnRank) -> Iterator[Any]:
        """Return an iterator of torch's for this world, from the current progress on."""
        self.feed.begin(world)
        if self._own_generator is not None:
            self._own_generator.manual_seed(_seed_at(self.feed.progress, world.rank))
        return super().__iter__()  # type: ignore[misc, no-any-return]


class DataLoader(ElasticLoader[T], TorchDataLoader[T]):  # type: ignore[misc]
    """torch's DataLoader for an elastic world, with the same arguments.

    `sampler` is an ElasticSampler (made from the dataset and `shuffle` if not given), or `dataset`
    is an ElasticStream. A step takes `batch_size` samples on each rank, or the batch of `policy`.

    Keep the sampler, or the stream, in the state: samples count as used when their step is
    committed, and come again when it is undone. An iterator stays valid across worlds and ends with
    its epoch; `iter(loader)` then returns the next epoch.

    At the end of an epoch the shares of ranks may be unequal: multiply the loss by `loader.weight`.
    A rank without a share gets a sample of another rank with weight 0.0, so that its collectives
    match.
    """


def _policy(policy: BatchPolicy | None, batch_size: int | None) -> BatchPolicy:
    if policy is None:
        if batch_size is None:
            raise ConfigError("A DataLoader needs batch_size or policy.")
        return BatchPolicy.scale_with_world(batch_size)
    if batch_size not in (None, 1):
        raise ConfigError(
            "Pass either batch_size or policy, not both: the policy sets the batch size."
        )
    return policy


def _sampler(dataset: Any, sampler: ElasticSampler | None, shuffle: bool | None) -> ElasticSampler:
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "An IterableDataset cannot follow a world that changes its size: use an ElasticStream "
            "over numbered shards instead."
        )
    if sampler is None:
        return ElasticSampler(dataset, shuffle=bool(shuffle))
    if not isinstance(sampler, ElasticSampler):
        raise ConfigError(
            f"sampler is a {type(sampler).__name__}: this loader needs an ElasticSampler."
        )
    if shuffle is not None:
        raise ConfigError("Pass shuffle to the sampler, not to the loader.")
    return sampler


def _refuse_sampler(sampler: object, shuffle: bool | None) -> None:
    if sampler is not None or shuffle is not None:
        raise ConfigError(
            "An ElasticStream has its own order: do not pass sampler or shuffle to the loader."
        )


def _seed_at(progress: DataProgress, rank: int) -> int:
    """Return the random seed of loading processes that start at this position."""
    text = f"{progress.seed} {progress.epoch} {progress.consumed} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
