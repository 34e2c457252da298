"""The order of an epoch: a permutation that is computed position by position, never stored.

A Feistel network over pairs (left, right) of numbers below `side`, the square root of the length,
rounded up. Each round adds a hash of one half to the other, modulo `side`, and swaps the halves: a
permutation of side x side numbers, whatever the hash. Those beyond the length are sent through the
network again until they fall inside; there are few, since side x side is hardly more.

It is made of exact arithmetic on 64-bit integers and is the same on every machine and with every
release of torch, which `torch.randperm` does not promise: ranks that disagree on the order would
skip samples and repeat others, and nobody would notice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

_ROUNDS = 8
#: Smaller networks do not reach all permutations equally often, which counting them shows.
_LEAST_SIDE = 8
_LONGEST = 1 << 60
#: Positions computed at once: 128 KiB, and a millisecond or two.
_BLOCK = 1 << 14
_MASK = (1 << 32) - 1


class Order:
    """The samples of one epoch in the order in which the whole world takes them.

    `key` is what it depends on besides the length: the seed and the epoch.
    """

    def __init__(self, length: int, *key: int, shuffle: bool = True) -> None:
        if not 0 <= length <= _LONGEST:
            raise ValueError(f"There is no order of {length} samples: 0 to 2**60 are possible.")
        self.length = length
        self._shuffle = shuffle
        self._side = max(_LEAST_SIDE, math.isqrt(max(0, length - 1)) + 1)
        self._keys = _round_keys(key)
        #: The block computed last, and the position it begins at.
        self._block: list[int] = []
        self._begin = 0

    def at(self, start: int, stop: int) -> list[int]:
        """The samples at these positions."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"Positions {start} to {stop} of an order of {self.length} samples.")
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
        if self.length < self._side**2 // 2:  # many go through it again and again: look them up
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
    """For each round 32 bits, unlike those of any other key."""
    text = " ".join(map(str, ("torchelastic", *key))).encode()
    digest = hashlib.blake2b(text, digest_size=4 * _ROUNDS).digest()
    return [int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4)]


def _hash(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """32 bits for each number. No product reaches 2**63: how an overflow goes is nobody's word."""
    mixed = (numbers + key) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x68E31DA5) & _MASK
    return mixed ^ (mixed >> 16)
