"""`BatchPolicy`: the batch size of a step in a world of any size, and each rank's share.

    policy = BatchPolicy.constant_global(256, micro=32)

    policy.batch(3)                256         samples of all ranks in a step
    policy.shares(3)               (86, 85, 85)
    policy.micro_batches(3)        3           of at most 32 samples, equally many on every rank
    policy.weight(0, 3)            1.0078125   86 of 256 samples, times 3

If ranks have unequal shares, averaging their gradients would give more weight to the samples of a
small share. DDP sums the gradients of all ranks and divides by their number. So each rank's mean
loss is multiplied by size * share / batch; the result is the mean over all samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from torchelastic.errors import ConfigError

if TYPE_CHECKING:
    from torchelastic.data.accumulation import Cutter, Micro
    from torchelastic.data.fixed_batch import FixedBatch

#: Maps the growth factor of the batch to the factor for the learning rate.
LrRule = Callable[[float], float]

_RULES: dict[str, LrRule] = {"linear": float, "sqrt": math.sqrt}


class MicroBatchSlice(NamedTuple):
    """A micro-batch: samples `start` to `stop` of a rank's share, and the factor for its mean loss.

    An empty one has the scale 0. It is still computed, on a placeholder sample, because the other
    ranks wait for its collectives.
    """

    start: int
    stop: int
    scale: float


class BatchPolicy(ABC):
    """The batch size of a step, and each rank's share of it. Immutable.

    To write your own policy, override `batch`, and `lr_factor` if the learning rate depends on the
    world size.
    """

    #: The most samples in a micro-batch; None: shares are not split.
    micro: int | None

    @property
    def turn(self) -> int:
        """Changes with the shares, if they change while the world does not."""
        return 0

    @staticmethod
    def constant_global(batch: int, *, micro: int | None = None) -> BatchPolicy:
        """The same number of samples in every step, whatever the size of the world.

        `micro` is the number of samples that fits into the memory of a rank: larger shares are
        split into micro-batches, and their gradients are summed.
        """
        return ConstantGlobal(batch, micro)

    @staticmethod
    def scale_with_world(
        per_rank: int,
        *,
        lr_rule: str | LrRule = "linear",
        base_size: int = 1,
        micro: int | None = None,
    ) -> BatchPolicy:
        """A fixed number of samples for each rank; the learning rate follows the batch size.

        The learning rate was chosen for a world of `base_size`. `lr_rule` is its factor when the
        batch is x times as large: x ("linear"), the square root of x ("sqrt"), or a function of x.
        """
        if isinstance(lr_rule, str) and lr_rule not in _RULES:
            known = ", ".join(_RULES)
            raise ConfigError(f"lr_rule is '{lr_rule}': use one of {known}, or a function.")
        rule = _RULES[lr_rule] if isinstance(lr_rule, str) else lr_rule
        return ScaleWithWorld(per_rank, micro, rule, base_size)

    @staticmethod
    def fixed(
        *,
        micro: int,
        count: int,
        seed: int = 0,
        shares: str = "speed",
        other_bits: str = "refuse",
    ) -> FixedBatch:
        """`count` micro-batches of `micro` samples in every step, and the same weights, to the bit,
        in a world of any size. Pass the policy to `TorchState(policy=...)` as well.

        `seed` is that of the random numbers inside micro-batches. `shares` is "speed" (slower
        workers run fewer micro-batches) or "equal". A worker that computes other bits than the
        others is refused, or with `other_bits="warn"` admitted with a warning.
        """
        from torchelastic.data.fixed_batch import FixedBatch

        if shares not in ("speed", "equal"):
            raise ConfigError(f"shares is '{shares}': it must be speed or equal.")
        if other_bits not in ("refuse", "warn"):
            raise ConfigError(f"other_bits is '{other_bits}': it must be refuse or warn.")
        by_speed = shares == "speed"
        return FixedBatch(micro, count, seed, by_speed=by_speed, other_bits=other_bits)

    @abstractmethod
    def batch(self, size: int) -> int:
        """Samples of all ranks in one step, by world size; an epoch may end with fewer."""

    def lr_factor(self, size: int) -> float:
        """The factor for the learning rate in a world of this size."""
        at_least_1("The size of a world", size)
        return 1.0

    def shares(self, size: int, batch: int | None = None) -> tuple[int, ...]:
        """The samples of each rank, split as evenly as possible, larger shares first; may be 0."""
        at_least_1("The size of a world", size)
        return _evenly(self._batch(size, batch), size)

    def micro_batches(self, size: int, batch: int | None = None) -> int:
        """The number of micro-batches per step: the same on every rank, so collectives match."""
        largest = self.shares(size, batch)[0]
        return max(1, -(-largest // self.micro)) if self.micro else 1

    def weight(self, rank: int, size: int, batch: int | None = None) -> float:
        """The factor for a rank's mean loss, so that DDP's mean over ranks is that over samples.

        0.0 for a rank whose share is empty.
        """
        return size * self.shares(size, batch)[rank] / self._batch(size, batch)

    def cuts(self, rank: int, size: int, batch: int | None = None) -> tuple[MicroBatchSlice, ...]:
        """A rank's micro-batches, each with its part of the rank's weight."""
        share, total = self.shares(size, batch)[rank], self._batch(size, batch)
        stops = list(accumulate(_evenly(share, self.micro_batches(size, batch))))
        return tuple(
            MicroBatchSlice(start, stop, size * (stop - start) / total)
            for start, stop in zip((0, *stops), stops, strict=False)
        )

    def accumulate(
        self,
        batch: Any,
        *models: Any,
        total: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        cut: Cutter | None = None,
    ) -> Iterator[Micro]:
        """This rank's share of a step, micro-batch by micro-batch.

            for micro in policy.accumulate(batch, model):
                inputs, targets = micro.data
                micro.backward(loss_of(model(inputs), targets))     # a mean over samples
            optimizer.step()

        Gradients are exchanged in the last backward only, whether a model is in DDP or is sharded
        by `fully_shard`. `batch` is a tensor, or lists, tuples and dicts of tensors, that have this
        rank's samples in their first dimension; `cut(batch, start, stop)` cuts anything else.
        `total` is the number of samples of all ranks in this step, if it is not
        `policy.batch(size)`: at the end of an epoch. A rank without samples passes one placeholder
        sample, whose weight is 0.
        """
        from torchelastic.data.accumulation import in_micro_batches
        from torchelastic.data.own_rank import own_rank

        here = own_rank(rank, size)
        cuts = self.cuts(here.rank, here.size, total)
        return in_micro_batches(batch, cuts, models, cut)

    def to_load(self, rank: int, size: int, batch: int, *, is_next: bool) -> Any:
        """The samples a rank loads for a step, if not its share (`data.fixed_batch`). `is_next` is
        False for later steps."""
        return None

    def _batch(self, size: int, batch: int | None) -> int:
        return self.batch(size) if batch is None else at_least_1("The batch", batch)


@dataclass(frozen=True)
class ConstantGlobal(BatchPolicy):
    """`BatchPolicy.constant_global`."""

    samples: int
    micro: int | None = None

    def __post_init__(self) -> None:
        at_least_1("The batch", self.samples)
        _check_micro(self.micro)

    def batch(self, size: int) -> int:
        at_least_1("The size of a world", size)
        return self.samples


@dataclass(frozen=True)
class ScaleWithWorld(BatchPolicy):
    """`BatchPolicy.scale_with_world`."""

    per_rank: int
    micro: int | None = None
    lr_rule: LrRule = float
    base_size: int = 1

    def __post_init__(self) -> None:
        at_least_1("per_rank", self.per_rank)
        at_least_1("base_size", self.base_size)
        _check_micro(self.micro)

    def batch(self, size: int) -> int:
        return self.per_rank * at_least_1("The size of a world", size)

    def lr_factor(self, size: int) -> float:
        return self.lr_rule(at_least_1("The size of a world", size) / self.base_size)


def _evenly(total: int, parts: int) -> tuple[int, ...]:
    each, more = divmod(total, parts)
    return (each + 1,) * more + (each,) * (parts - more)


def _check_micro(micro: int | None) -> None:
    if micro is not None:
        at_least_1("micro", micro)


def at_least_1(name: str, number: int) -> int:
    if number < 1:
        raise ConfigError(f"{name} is {number}: it must be 1 or more.")
    return number
