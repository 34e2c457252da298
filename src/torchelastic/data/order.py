"""The order of an epoch: a permutation that is computed position by position, never stored.

A Feistel network over pairs (left, right) of numbers below `side`, the square root of the length,
rounded up. Each round adds a hash of one half to the other, modulo `side`, and swaps the halves: a
permutation of side x side numbers, whatever the hash. Those beyond the length are sent through the
network again until they fall inside; there are few, since side x side is hardly more.

It is made of exact arithmetic on 64-bit integers and is the same on every machine and with every
release of torch, which `torch.randperm` does not promise: ranks that disagree on the order would
silently skip samples and repeat others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

_ROUNDS = 8
#: Smaller networks measurably do not reach all permutations equally often.
_SIDE_MINIMUM = 8
_LENGTH_LIMIT = 1 << 60
#: Positions computed at once: 128 KiB, and a millisecond or two.
_BLOCK = 1 << 14
_MASK = (1 << 32) - 1


class Order:
    """The samples of one epoch in the order in which the whole world takes them.

    Besides the length it depends on `key`: the seed and the epoch.
    """

    def __init__(self, length: int, *key: int, shuffle: bool = True) -> None:
        if not 0 <= length <= _LENGTH_LIMIT:
            raise ValueError(f"length is {length} samples: it must be between 0 and 2**60.")
        self.length = length
        self._shuffle = shuffle
        self._side = max(_SIDE_MINIMUM, math.isqrt(max(0, length - 1)) + 1)
        self._keys = _round_keys(key)
        #: The block computed last, and the position it begins at.
        self._block: list[int] = []
        self._begin = 0

    def at(self, start: int, stop: int) -> list[int]:
        """The samples at these positions."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(
                f"Positions {start} to {stop} are outside an order of {self.length} samples."
            )
        if not self._shuffle:
            return list(range(start, stop))
        found: list[int] = []
        while start < stop:
            begin = start - start % _BLOCK
            block = self._compute(begin)
            found += block[start - begin : stop - begin]
            start = begin + len(block)
        return found

    def _compute(self, begin: int) -> list[int]:
        if begin != self._begin or not self._block:
            positions = torch.arange(begin, min(begin + _BLOCK, self.length))
            self._block, self._begin = self._permuted(positions).tolist(), begin
        return self._block

    def _permuted(self, positions: torch.Tensor) -> torch.Tensor:
        network: Callable[[torch.Tensor], torch.Tensor] = self._network
        if self.length < self._side**2 // 2:  # many would need several passes: use a table
            network = network(torch.arange(self._side**2)).__getitem__
        samples = network(positions)
        outside = (samples >= self.length).nonzero().squeeze(1)
        while len(outside):
            again = network(samples[outside])
            samples[outside] = again
            outside = outside[again >= self.length]
        return samples

    def _network(self, numbers: torch.Tensor) -> torch.Tensor:
        side = self._side
        left, right = numbers // side, numbers % side
        for key in self._keys:
            moved = left + (_hash(right, key) * side >> 32)
            left, right = right, torch.where(moved < side, moved, moved - side)
        return left * side + right


def _round_keys(key: tuple[int, ...]) -> list[int]:
    """Derive 32 bits for each round from the key."""
    text = " ".join(map(str, ("torchelastic", *key))).encode()
    digest = hashlib.blake2b(text, digest_size=4 * _ROUNDS).digest()
    return [int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4)]


def _hash(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """Hash each number to 32 bits. No product reaches 2**63, where overflow is undefined."""
    mixed = (numbers + key) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x68E31DA5) & _MASK
    return mixed ^ (mixed >> 16)
