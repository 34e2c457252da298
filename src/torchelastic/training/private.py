"""Rank-private state: random states and buffers, which die with a rank unless it leaves them.

They are left in the slate, memory of the agent's that costs no system call to write. A rank that is
in step m may be needed, by whoever takes its place, as it was
    at the beginning of m - 1   if it was ahead: its peers have not got out of step m - 1;
    at the beginning of m       in the ordinary case;
    at the end of m             if its peers have finished m: then it had taken part in all of m's
                                collectives, and what it had drawn before the last is what counts.
So before each collective of step m it leaves what it has for the end of m, in one of three slots in
turn. Most often this is what it has at the beginning of m + 1, too; if not, it leaves that in one
of two more. Killed while it writes, it leaves a torn slot that nobody needs: nobody gets to the end
of m before the collective is launched.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torchelastic.training import rng
from torchelastic.training.buffers import Buffers

log = logging.getLogger(__name__)

Version = tuple[int, int]

#: The lengths of the pieces.
_HEAD = struct.Struct("=3q")
_IN_FLIGHT = (0, 1, 2)
_BEGIN = (3, 4)


class Slate(Protocol):
    """What is needed of `worker.slate.Slate`."""

    def publish(self, slot: int, version: Version, pieces: Sequence[bytes]) -> bool: ...

    def held(self, slot: int) -> tuple[Version, bytes] | None: ...


class Private(NamedTuple):
    """The private state of a rank at one moment."""

    random: rng.Random
    buffers: bytes


def capture(buffers: Buffers) -> Private:
    return tuple.__new__(Private, (rng.capture(), buffers.capture()))


def restore(private: Private, buffers: Buffers) -> bool:
    """Put it back; False if the buffers were of another model and are left as they are."""
    rng.restore(private.random)
    return buffers.restore(private.buffers)


class Publisher:
    """Leaves this rank's private state in its slate."""

    def __init__(self, slate: Slate) -> None:
        self._slate = slate
        self._left: tuple[Version, Private] | None = None
        self._lengths = (0, 0, 0)
        self._head = b""
        self._with_buffers = True

    def begin(self, version: Version, private: Private) -> None:
        """A step begins. Nothing is written if nothing was drawn since the last collective."""
        if self._left != (version, private):
            self._publish(_BEGIN[version[1] % 2], version, private)

    def in_flight(self, version: Version, private: Private) -> None:
        """A collective is about to be launched; `version` is the one at the end of the step."""
        if self._left != (version, private):
            self._publish(_IN_FLIGHT[version[1] % 3], version, private)
            self._left = version, private

    def _publish(self, slot: int, version: Version, private: Private) -> None:
        (torch, others), buffers = private
        if not self._with_buffers:
            buffers = b""
        lengths = len(torch), len(others), len(buffers)
        if lengths != self._lengths:
            self._lengths, self._head = lengths, _HEAD.pack(*lengths)
        written = self._slate.publish(slot, version, (self._head, torch, others, buffers))
        if not written and self._with_buffers:
            self._with_buffers = False
            log.warning(
                "The buffers of the model are too large to be kept for a replacement of this "
                "worker, which will take those of another rank instead."
            )
            self._publish(slot, version, private)


def unpack(data: bytes) -> Private:
    torch, others, buffers = _HEAD.unpack_from(data)
    begin, middle, end = _HEAD.size, _HEAD.size + torch, _HEAD.size + torch + others
    random = rng.Random(data[begin:middle], data[middle:end])
    return Private(random, data[end : end + buffers])


def left_behind(slate: Slate, base: Version) -> Private | None:
    """What the worker that had this slate before us left of itself at `base`.

    A generation that it died in before its first step calls the same step by its own number, so
    the latest with this step will do. Of two, the one left at the beginning of the step is exact.
    """
    found = []
    for slot in (*_IN_FLIGHT, *_BEGIN):
        held = slate.held(slot)
        if held is not None and held[0][1] == base[1]:
            found.append((held[0] == base, held[0], slot, held[1]))
    return unpack(max(found)[-1]) if found else None
