"""The samples of an epoch's order that a step takes, and each rank's share of them.

A step takes the next samples of the order; the policy sets their number by the world size. They are
split into one share for each rank, in the order of the ranks. The rest at the end of an epoch is
one more step with a smaller batch, or is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from torchelastic.errors import ConfigError


class Policy(Protocol):
    """The methods of BatchPolicy that are used here."""

    @property
    def turn(self) -> int: ...

    def batch(self, size: int) -> int: ...

    def shares(self, size: int, batch: int) -> tuple[int, ...]: ...

    def to_load(self, rank: int, size: int, batch: int, *, is_next: bool) -> Any: ...


class Share(NamedTuple):
    """Positions in the order of an epoch: this rank's, among those of all ranks in a step."""

    start: int
    stop: int
    #: Of all ranks.
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """The rest of an epoch, for one rank, while the world does not change."""

    position: int
    length: int
    rank: int
    size: int
    policy: Policy
    drop_last: bool = False

    def __iter__(self) -> Iterator[Share]:
        """This rank's shares, step after step; some may be empty at the end."""
        batch, begin = batch_of(self.policy, self.size), self.position
        shares = shares_of(self.policy, self.size, batch)
        while begin + batch <= self.length:
            yield share_of(self.rank, shares, begin)
            begin += batch
        if begin < self.length and not self.drop_last:
            rest = shares_of(self.policy, self.size, self.length - begin)
            yield share_of(self.rank, rest, begin)

    def __len__(self) -> int:
        """The number of steps left."""
        steps, more = divmod(self.length - self.position, batch_of(self.policy, self.size))
        return steps + (more > 0 and not self.drop_last)


def batch_of(policy: Policy, size: int) -> int:
    """Return the batch size of a step. Refuses 0 from a custom policy: it would loop forever."""
    batch = policy.batch(size)
    if batch < 1:
        raise ConfigError(f"policy.batch({size}) returned {batch}: it must be at least 1 sample.")
    return batch


def shares_of(policy: Policy, size: int, batch: int) -> tuple[int, ...]:
    """Return the samples of each rank. Refuses shares of a custom policy that do not add up."""
    shares = policy.shares(size, batch)
    if len(shares) != size or sum(shares) != batch or min(shares) < 0:
        raise ConfigError(
            f"policy.shares({size}, {batch}) returned {shares}: need {size} shares that add up."
        )
    return shares


def share_of(rank: int, shares: tuple[int, ...], begin: int) -> Share:
    """Return the share of a rank in a step whose samples start at `begin`."""
    bounds = tuple(accumulate(shares, initial=begin))
    return Share(bounds[rank], bounds[rank + 1], begin, bounds[-1])


def every_nth(
    position: int, length: int, rank: int, size: int, *, drop_last: bool
) -> Iterator[int]:
    """Yield the positions of one rank if steps are not known: the ranks take turns.

    All ranks get the same number. After each has taken n positions, all ranks have taken the next
    n * size of the order. An incomplete last turn is dropped, or padded with the first positions.
    """
    left = length - position
    for turn in range(turns_left(position, length, size, drop_last=drop_last)):
        yield position + (turn * size + rank) % left


def turns_left(position: int, length: int, size: int, *, drop_last: bool) -> int:
    """The number of positions that `every_nth` yields."""
    left = length - position
    return left // size if drop_last else -(-left // size)
