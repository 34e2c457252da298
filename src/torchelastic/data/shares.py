"""Which samples of an epoch's order are taken in a step, and by whom.

A step takes the next samples of the order, as many as the policy says for the size of the world.
They are cut into one share for each rank, in the order of the ranks. What is left at the end of an
epoch is one more step with a smaller batch, or is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from torchelastic.errors import ConfigError


class Policy(Protocol):
    """What is asked of a BatchPolicy here."""

    def batch(self, size: int) -> int: ...

    def shares(self, size: int, batch: int) -> tuple[int, ...]: ...


class Share(NamedTuple):
    """Positions in the order of an epoch: this rank's, among those of all ranks in a step."""

    start: int
    stop: int
    #: Of all ranks.
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """The rest of an epoch, for one rank of a world that stays as it is."""

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
        """How many steps are left."""
        steps, more = divmod(self.length - self.position, batch_of(self.policy, self.size))
        return steps + (more > 0 and not self.drop_last)


def batch_of(policy: Policy, size: int) -> int:
    """Samples of a step. A policy of the user's own that says none would take none for ever."""
    batch = policy.batch(size)
    if batch < 1:
        raise ConfigError(f"policy.batch({size}) returned {batch}: it must be at least 1 sample.")
    return batch


def shares_of(policy: Policy, size: int, batch: int) -> tuple[int, ...]:
    """Samples of each rank. A policy of the user's own may not lose any, nor give them twice."""
    shares = policy.shares(size, batch)
    if len(shares) != size or sum(shares) != batch or min(shares) < 0:
        raise ConfigError(
            f"policy.shares({size}, {batch}) returned {shares}: need {size} shares that add up."
        )
    return shares


def share_of(rank: int, shares: tuple[int, ...], begin: int) -> Share:
    """The share of a rank in a step whose samples begin there."""
    bounds = tuple(accumulate(shares, initial=begin))
    return Share(bounds[rank], bounds[rank + 1], begin, bounds[-1])


def every_nth(
    position: int, length: int, rank: int, size: int, *, drop_last: bool
) -> Iterator[int]:
    """Positions of one rank where steps are not known: one for each rank in turn.

    All ranks have equally many. After each has taken n of them, all together have taken the next
    n * size of the order. The last turn may be incomplete: it is dropped, or filled up with the
    positions that the turns began with.
    """
    left = length - position
    for turn in range(turns_left(position, length, size, drop_last=drop_last)):
        yield position + (turn * size + rank) % left


def turns_left(position: int, length: int, size: int, *, drop_last: bool) -> int:
    """How many positions `every_nth` gives."""
    left = length - position
    return left // size if drop_last else -(-left // size)
