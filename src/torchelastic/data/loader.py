"""`DataLoader`: torch's, over data that outlives worlds.

Its iterator gives one batch for each step: this rank's share of the samples that all ranks take. It
tells the sampler what it has handed out; what its workers have loaded in advance counts for
nothing. Before each batch it looks whether the world is another one, or the sampler was put back.
Then it drops what was loaded in advance and goes on with the shares that are right now.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.own_rank import OwnRank
from torchelastic.data.progress import Handed, Position, Progress
from torchelastic.data.sampler import ElasticSampler
from torchelastic.data.shares import Plan, Policy
from torchelastic.data.streaming import CollateStep, ElasticStream, StreamFeed, StreamSteps
from torchelastic.errors import ConfigError
from torchelastic.worker_counters import stalls

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class Feed(Protocol):
    """Between torch's loader, which it tells what to load, and our iterator.

    As torch's `batch_sampler` it is iterated once for each of torch's iterators.
    """

    @property
    def progress(self) -> Progress: ...

    def begin(self, world: OwnRank) -> None:
        """What is iterated next is for this world, from the place where the progress is."""

    def __iter__(self) -> Iterator[list[Any]]: ...

    def unfold(self, loaded: Any) -> tuple[Any, Handed, Position]:
        """A batch that was loaded, what it is, and the place behind it."""


class SampledFeed:
    """Numbers of samples, for a dataset that is asked for them."""

    def __init__(self, sampler: ElasticSampler, policy: Policy, *, drop_last: bool) -> None:
        self.progress, self._policy, self._drop_last = sampler, policy, drop_last
        self._plan = self.plan(OwnRank(0, 1))
        #: What workers are to load, or have loaded, in the order in which it comes back.
        self._ahead: deque[Handed] = deque()

    def plan(self, world: OwnRank) -> Plan:
        """The rest of the epoch in this world."""
        sampler = self.progress
        return Plan(sampler.consumed, sampler.length, *world, self._policy, self._drop_last)

    def begin(self, world: OwnRank) -> None:
        self._plan = self.plan(world)

    def __iter__(self) -> Iterator[list[int]]:
        self._ahead.clear()
        return self._load(self._plan)

    def _load(self, plan: Plan) -> Iterator[list[int]]:
        order, epoch = self.progress.order, self.progress.epoch
        for share in plan:
            ids = order.at(share.start, share.stop)
            span = share.begin, share.end
            self._ahead.append(Handed(epoch, plan.rank, plan.size, span, tuple(ids)))
            # A rank without a share has one sample stand in: the others wait for its collectives.
            yield ids or order.at(share.begin, share.begin + 1)

    def unfold(self, loaded: Any) -> tuple[Any, Handed, Position]:
        handed = self._ahead.popleft()
        return loaded, handed, Position(handed.epoch, handed.span[1])

    def __len__(self) -> int:
        return len(self.plan(self.progress.world()))


class ElasticBatches(Iterator[T]):
    """An iterator over the batches of an epoch, in whatever worlds they are taken."""

    def __init__(self, loader: ElasticLoader[T]) -> None:
        self._loader = loader
        self._feed, self._progress = loader.feed, loader.feed.progress
        #: What torch's iterator was made for; it is dropped when any of it is no longer so.
        self._world: OwnRank | None = None
        self._turn = -1
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
        # Not there while it is asked: one that has raised an error has lost its place.
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
        )

    def _begin(self) -> None:
        progress = self._progress
        same_epoch = self._place.epoch == progress.epoch
        # Without a jump another epoch means that another iterator has come to the end of this one.
        self._ended = self._turn == progress.turn and not same_epoch
        self._turn, self._place, self._world = progress.turn, progress.position, progress.world()
        self._loaded = None  # ends its workers before others are started
        if not self._ended:
            self._loaded = self._loader.load_from_here(self._world)


class ElasticLoader(Generic[T]):
    """What makes a loader elastic: put before torch's DataLoader, or one that derives from it."""

    feed: Feed
    #: What the latest batch is: whose samples, of how many; None before the first.
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
            raise ConfigError("What a batch is depends on the world: give batch_size or policy.")
        if not options.get("in_order", True):
            raise ConfigError("Batches are counted in their order: in_order=False cannot be.")
        shown = batch_size if policy is None else None
        policy = _policy(policy, batch_size)
        if isinstance(dataset, ElasticStream):
            _refuse_sampler(sampler, shuffle)
            steps = StreamSteps(dataset, policy, drop_last=drop_last or dataset.drop_last)
            self.feed, dataset = StreamFeed(dataset), steps
            collate_fn = CollateStep(collate_fn or default_collate)
        else:
            sampler = _sampler(dataset, sampler, shuffle)
            drop_last = drop_last or sampler.drop_last
            self.feed = SampledFeed(sampler, policy, drop_last=drop_last)
        #: Else a number is drawn from the global generator whenever torch's iterator is made:
        #: a step done again would see other random numbers than the first time.
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
        # What frameworks look for. torch's own `__setattr__` keeps users from changing them.
        object.__setattr__(self, "sampler", self.feed.progress)
        object.__setattr__(self, "batch_size", shown)

    @property
    def progress(self) -> Progress:
        """How far the training is in the data: the sampler, or the stream."""
        return self.feed.progress

    @property
    def weight(self) -> float:
        """What this rank's mean loss of the latest batch is multiplied with, before `backward`.

        1.0 as long as all ranks have equally many samples. With it, DDP's mean over ranks is the
        mean over samples; a rank whose batch only stands in for an empty one has 0.0.
        """
        return self._latest().weight

    @property
    def total(self) -> int:
        """How many samples all ranks together have in the step of the latest batch."""
        return self._latest().total

    def _latest(self) -> Handed:
        if self.handed is None:
            raise RuntimeError("No batch was handed out yet.")
        return self.handed

    def __iter__(self) -> Iterator[T]:
        return ElasticBatches(self)

    def load_from_here(self, world: OwnRank) -> Iterator[Any]:
        """An iterator of torch's, from where the progress is, for this world."""
        self.feed.begin(world)
        if self._own_generator is not None:
            self._own_generator.manual_seed(_seed_at(self.feed.progress, world.rank))
        return super().__iter__()  # type: ignore[misc, no-any-return]


class DataLoader(ElasticLoader[T], TorchDataLoader[T]):  # type: ignore[misc]
    """torch's DataLoader for an elastic world, with the same arguments.

    `sampler` is an ElasticSampler (made from the dataset and `shuffle` if not given), or `dataset`
    is an ElasticStream. A step takes `batch_size` samples on each rank, or what `policy` says.

    Keep the sampler, or the stream, in the state: what was handed out counts when a step is
    committed, and comes again when it is undone. Iterators may be kept from world to world. One
    ends with its epoch; `iter(loader)` then gives the next epoch.

    At the end of an epoch the shares of ranks may be unequal: multiply the loss with
    `loader.weight`. A rank for which nothing is left is given another rank's sample, weight 0.0, so
    that its collectives match.
    """


def _policy(policy: BatchPolicy | None, batch_size: int | None) -> BatchPolicy:
    if policy is None:
        if batch_size is None:
            raise ConfigError("A loader needs a batch_size or a policy: samples come in batches.")
        return BatchPolicy.scale_with_world(batch_size)
    if batch_size not in (None, 1):
        raise ConfigError("Give batch_size or policy: the policy says how large a batch is.")
    return policy


def _sampler(dataset: Any, sampler: ElasticSampler | None, shuffle: bool | None) -> ElasticSampler:
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "An IterableDataset decides itself what comes next, and cannot follow the world: make "
            "it an ElasticStream over numbered shards."
        )
    if sampler is None:
        return ElasticSampler(dataset, shuffle=bool(shuffle))
    if not isinstance(sampler, ElasticSampler):
        raise ConfigError(
            f"The sampler is a {type(sampler).__name__}: this loader needs an ElasticSampler."
        )
    if shuffle is not None:
        raise ConfigError("Say shuffle to the sampler, not to the loader.")
    return sampler


def _refuse_sampler(sampler: object, shuffle: bool | None) -> None:
    if sampler is not None or shuffle is not None:
        raise ConfigError("A stream has its own order: give the loader no sampler and no shuffle.")


def _seed_at(progress: Progress, rank: int) -> int:
    """For the random numbers of loading processes that begin here."""
    text = f"{progress.seed} {progress.epoch} {progress.consumed} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
