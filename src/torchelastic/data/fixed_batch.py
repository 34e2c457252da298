"""`BatchPolicy.fixed`: the same gradient, to the bit, for any number of workers.

The batch of a step is cut into numbered micro-batches of fixed shape. Each worker runs a range of
them. Gradients are added along one binary tree over the micro-batches, whoever ran them:

    6 micro-batches          a worker with micro-batches 0 to 2 holds the sums of two subtrees,
          [0,6)              [0,2) and [2,3): complete, but their siblings are elsewhere.
         /     \\
      [0,4)    [4,6)         The left child has the largest power of two of the micro-batches.
      /   \\    /  \\
   [0,2) [2,4) 4   5

With a sharded model, a replica takes the place of a worker: a micro-batch belongs to one replica,
and its samples are divided among the workers of it that read different samples.

This module is pure: the tree, which worker runs what, and what the samples weigh.
`training.fixed_sums` adds the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchelastic.data.batch_policy import BatchPolicy, MicroBatchSlice, at_least_1
from torchelastic.data.own_rank import OwnRank, own_rank
from torchelastic.errors import ConfigError

if TYPE_CHECKING:
    from torchelastic.data.accumulation import Cutter, Micro

#: Micro-batches from (inclusive), to (exclusive).
Subtree = tuple[int, int]


class SumTree:
    """The order of additions for this many micro-batches."""

    def __init__(self, count: int) -> None:
        self.count = count
        #: A subtree -> its sibling and their parent.
        self.up: dict[Subtree, tuple[Subtree, Subtree]] = {}
        self._grow(0, count)

    def _grow(self, start: int, stop: int) -> None:
        if stop - start < 2:
            return
        middle = _middle(start, stop)
        left, right, parent = (start, middle), (middle, stop), (start, stop)
        self.up[left], self.up[right] = (right, parent), (left, parent)
        self._grow(*left)
        self._grow(*right)

    def subtrees(self, micro_batches: Iterable[int]) -> list[Subtree]:
        """The largest complete subtrees of a set of micro-batches, in their order."""
        held = {(one, one + 1) for one in micro_batches}
        for subtree in sorted(self.up, key=lambda one: one[1] - one[0]):
            sibling, parent = self.up[subtree]
            if subtree in held and sibling in held:
                held -= {subtree, sibling}
                held.add(parent)
        return sorted(held)


def _middle(start: int, stop: int) -> int:
    """Where the left child of a subtree ends: it has the largest power of two."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))


@lru_cache(maxsize=64)
def tree_of(count: int) -> SumTree:
    return SumTree(count)


@lru_cache(maxsize=256)
def ranges(count: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    """Cut `count` micro-batches into one range for each worker, which may be empty.

    First the shortest step, by the workers' relative speeds; then the fewest subtrees, each of
    which is sent.
    """
    most = _most(count, speeds)
    #: Micro-batches given out so far -> how many subtrees are sent, and where it was cut.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for own in most:
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (sent, cuts) in sorted(best.items(), reverse=True):
            for stop in range(min(count, start + own), start - 1, -1):
                cost = sent + _pieces(start, stop, 0, count)
                if stop not in longer or cost < longer[stop][0]:
                    longer[stop] = cost, (*cuts, stop)
        best = longer
    cuts = best[count][1]
    return tuple(range(*cut) for cut in pairwise(cuts))


def _most(count: int, speeds: Sequence[float]) -> list[int]:
    """The most micro-batches that each worker can run in the shortest possible step."""
    given = [0] * len(speeds)
    slowest = 0.0
    for _ in range(count):
        took, rank = min(((given[rank] + 1) / speed, rank) for rank, speed in enumerate(speeds))
        given[rank] += 1
        slowest = max(slowest, took)
    return [math.floor(slowest * speed + 1e-9) for speed in speeds]


@cache
def _pieces(start: int, stop: int, first: int, last: int) -> int:
    """The number of largest subtrees of a range, within one subtree."""
    start, stop = max(start, first), min(stop, last)
    if start >= stop:
        return 0
    if (start, stop) == (first, last):
        return 1
    middle = _middle(first, last)
    return _pieces(start, stop, first, middle) + _pieces(start, stop, middle, last)


class ToLoad(NamedTuple):
    """The samples that a rank loads for a step, if they are not one run: positions in the step."""

    to_load: list[tuple[int, int]]
    #: The samples that it has used in the end: also those of sums that it holds already, but not
    #: placeholders.
    credited: list[tuple[int, int]]


class StepRunner(Protocol):
    """The methods of `training.fixed_steps.FixedSteps` that are used here, a layer below."""

    loss: float | None
    turn: int

    @property
    def readers(self) -> int: ...

    def speeds(self, size: int) -> tuple[float, ...]: ...

    def resumed(self, size: int, total: int) -> Assignment | None: ...

    def accumulate(
        self,
        batch: Any,
        models: Sequence[Any],
        total: int | None,
        here: OwnRank,
        cut: Cutter | None,
    ) -> Iterator[Micro]: ...


@dataclass(frozen=True)
class FixedBatch(BatchPolicy):
    """`BatchPolicy.fixed`."""

    micro: int
    count: int
    seed: int = 0
    #: Whether a worker that is slower than others runs fewer micro-batches.
    by_speed: bool = True
    #: What happens to a worker that computes other bits: "refuse" or "warn".
    other_bits: str = "refuse"
    #: Runs the micro-batches of the state that this policy was passed to.
    steps: StepRunner | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        at_least_1("micro", self.micro)
        at_least_1("count", self.count)

    def accumulate(
        self,
        batch: Any,
        *models: Any,
        total: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        cut: Cutter | None = None,
    ) -> Iterator[Micro]:
        return self._attached().accumulate(batch, models, total, own_rank(rank, size), cut)

    @property
    def loss(self) -> float | None:
        """The loss of the last step: the mean over the samples of all ranks."""
        return self._attached().loss

    def attach(self, steps: StepRunner) -> None:
        """Let the micro-batches be run by a state's `FixedSteps`."""
        object.__setattr__(self, "steps", steps)

    def _attached(self) -> StepRunner:
        if self.steps is None:
            raise ConfigError(
                "BatchPolicy.fixed needs a state: pass it to TorchState(policy=policy) first."
            )
        return self.steps

    def batch(self, size: int) -> int:
        at_least_1("The size of a world", size)
        return self.micro * self.count

    def micro_batches_of(self, size: int, batch: int | None = None) -> tuple[range, ...]:
        """The micro-batches of each rank. The last step of an epoch has fewer, and the last of
        them may have fewer samples."""
        at_least_1("The size of a world", size)
        replicas, more = divmod(size, self.readers)
        if more:
            raise ConfigError(
                f"A world of {size} is not whole: in each replica {self.readers} workers read "
                "different samples."
            )
        speeds = (1.0,) * replicas if self.steps is None else self.steps.speeds(replicas)
        every = ranges(-(-self._batch(size, batch) // self.micro), speeds)
        return tuple(own for own in every for _ in range(self.readers))

    @property
    def readers(self) -> int:
        """The number of workers that divide the samples of a micro-batch among them: those of a
        replica, if a model is sharded."""
        return 1 if self.steps is None else self.steps.readers

    @property
    def turn(self) -> int:
        """Counts changes of the shares, which the size of the world does not show."""
        return 0 if self.steps is None else self.steps.turn

    def shares(self, size: int, batch: int | None = None) -> tuple[int, ...]:
        total = self._batch(size, batch)
        return tuple(
            sum(stop - start for start, stop in self.spans(own, total, rank))
            for rank, own in enumerate(self.micro_batches_of(size, batch))
        )

    def spans(
        self, micro_batches: Iterable[int], total: int, rank: int = 0
    ) -> list[tuple[int, int]]:
        """A rank's part of micro-batches, by positions in a step of this many samples; it may be
        empty."""
        reader, found = rank % self.readers, []
        for one in micro_batches:
            start, stop = one * self.micro, min(total, (one + 1) * self.micro)
            cuts = [start + (stop - start) * cut // self.readers for cut in (reader, reader + 1)]
            found.append((cuts[0], cuts[1]))
        return found

    def micro_batches(self, size: int, batch: int | None = None) -> int:
        raise ConfigError(
            "With BatchPolicy.fixed, ranks have different numbers of micro-batches: "
            "use policy.micro_batches_of(size)."
        )

    def cuts(self, rank: int, size: int, batch: int | None = None) -> tuple[MicroBatchSlice, ...]:
        """A rank's micro-batches, each with its part of all samples of the step."""
        own = self.micro_batches_of(size, batch)[rank]
        return self.slices(own, self._batch(size, batch), rank)

    def slices(
        self, micro_batches: Iterable[int], total: int, rank: int = 0
    ) -> tuple[MicroBatchSlice, ...]:
        """Where a rank's part of these micro-batches is in a batch that has only that.

        An empty part has a placeholder of weight 0: all workers of a replica run a micro-batch
        together. Weights make up for the mean over them that `fully_shard` computes.
        """
        at, found = 0, []
        for start, stop in self.spans(micro_batches, total, rank):
            length, weight = max(stop - start, 1), self.readers * (stop - start) / total
            found.append(MicroBatchSlice(at, at + length, weight))
            at += length
        return tuple(found)

    def weight(self, rank: int, size: int, batch: int | None = None) -> float:
        raise ConfigError(
            "With BatchPolicy.fixed there is no weight for a whole share: the loss of each "
            "micro-batch has its own. Use policy.accumulate."
        )

    def to_load(self, rank: int, size: int, batch: int, *, is_next: bool) -> ToLoad | None:
        """See `BatchPolicy.to_load`. The next step may be an interrupted one, of which workers hold
        sums."""
        steps = self.steps if is_next else None
        assigned = None if steps is None else steps.resumed(size, batch)
        if assigned is not None:
            kept, again = assigned.kept[rank], assigned.again[rank]
            return ToLoad(self.spans(again, batch), self.spans(sorted({*kept, *again}), batch))
        if self.readers == 1:
            return None
        own = self.micro_batches_of(size, batch)[rank]
        parts = self.spans(own, batch, rank)
        placed = [
            (start, stop) if stop > start else (one * self.micro, one * self.micro + 1)
            for one, (start, stop) in zip(own, parts, strict=True)
        ]
        return ToLoad(placed, parts)


class Assignment(NamedTuple):
    """Micro-batches by rank: those whose sum it holds already, and those it runs."""

    kept: Sequence[frozenset[int]]
    again: Sequence[Sequence[int]]


def resume(count: int, held: Sequence[Iterable[int]]) -> Assignment:
    """Share out the micro-batches that no rank holds a sum of.

    If two ranks hold a micro-batch, it counts for the lower one; the sum of the other is not used.
    """
    tree = tree_of(count)
    taken: set[int] = set()
    kept = []
    for micro_batches in held:
        own: set[int] = set()
        for start, stop in tree.subtrees(one for one in micro_batches if one < count):
            if taken.isdisjoint(range(start, stop)):
                own.update(range(start, stop))
        taken |= own
        kept.append(frozenset(own))
    lost = [one for one in range(count) if one not in taken]
    parts = ranges(len(lost), (1.0,) * len(held)) if lost else [range(0)] * len(held)
    return Assignment(kept, [[lost[place] for place in part] for part in parts])
