"""Rank-private state: random states and buffers, which die with a rank unless it leaves them.

They are left in the slate, memory of the agent's that costs no system call to write. A rank that is
in step m may be needed, by whoever takes its place, as it was
    at the beginning of m - 1   if it was ahead: its peers have not got out of step m - 1;
    at the beginning of m       in the ordinary case;
    at the end of m             if its peers have finished m: then it had taken part in all of m's
                                collectives, and what it had drawn before the last is what counts.
Slot 0, written at the beginning of a step, holds the first two. Slot 1, written before each
collective, holds the last two. So a rank killed while it writes one leaves what can be needed in
the other: beyond the beginning of m nobody gets before it has launched the collective.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torchelastic.training import rng
from torchelastic.training.buffers import Buffers

log = logging.getLogger(__name__)

Version = tuple[int, int]

#: generation, step, then the lengths of the pieces.
_HEAD = struct.Struct("=qq5q")
_BEGIN, _IN_FLIGHT = 0, 1


class Slate(Protocol):
    """What is needed of `worker.slate.Slate`."""

    def publish(self, slot: int, version: Version, pieces: Sequence[bytes]) -> bool: ...

    def held(self, slot: int) -> tuple[Version, bytes] | None: ...


class Private(NamedTuple):
    """The private state of a rank at one moment."""

    random: rng.Random
    buffers: bytes


def capture(buffers: Buffers) -> Private:
    return Private(rng.capture(), buffers.capture())


def restore(private: Private, buffers: Buffers) -> bool:
    """Put it back; False if the buffers were of another model and are left as they are."""
    rng.restore(private.random)
    return buffers.restore(private.buffers)


class Publisher:
    """Leaves this rank's private state in its slate."""

    def __init__(self, slate: Slate) -> None:
        self._slate = slate
        #: The beginning of this step, ready to be written.
        self._begun = b""
        self._in_flight: Private | None = None
        self._with_buffers = True

    def begin(self, version: Version, private: Private) -> None:
        """A step begins; the one before it is still held."""
        before, self._begun = self._begun, self._pack(version, private)
        self._in_flight = None
        self._publish(_BEGIN, version, [before, self._begun])

    def in_flight(self, version: Version, private: Private) -> None:
        """A collective is about to be launched; `version` is the one at the end of the step."""
        if private == self._in_flight:
            return
        self._in_flight = private
        self._publish(_IN_FLIGHT, version, [self._begun, self._pack(version, private)])

    def _pack(self, version: Version, private: Private) -> bytes:
        if not self._with_buffers:
            private = private._replace(buffers=b"")
        return pack(version, private)

    def _publish(self, slot: int, version: Version, pieces: list[bytes]) -> None:
        if not self._slate.publish(slot, version, pieces) and self._with_buffers:
            self._with_buffers = False
            log.warning(
                "The buffers of the model are too large to be kept for a replacement of this "
                "worker, which will take those of another rank instead."
            )


def pack(version: Version, private: Private) -> bytes:
    (torch, python, numpy, cuda), buffers = private
    sizes = len(torch), len(python), len(numpy), len(cuda), len(buffers)
    return b"".join((_HEAD.pack(*version, *sizes), torch, python, numpy, cuda, buffers))


def unpack(data: bytes) -> Iterator[tuple[Version, Private]]:
    """What was packed, one after the other."""
    at = 0
    while at < len(data):
        generation, step, *sizes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        pieces = []
        for size in sizes:
            pieces.append(data[at : at + size])
            at += size
        yield (generation, step), Private(rng.Random(*pieces[:4]), pieces[4])


def left_behind(slate: Slate, base: Version) -> Private | None:
    """What the worker that had this slate before us left of itself at `base`.

    A generation that it died in before its first step calls the same step by its own number, so
    the latest with this step will do. Of two, the beginning of a step says it exactly; what was
    left before the last collective is the next best.
    """
    found = [
        (version, private)
        for slot in (_BEGIN, _IN_FLIGHT)
        for version, private in _held(slate, slot)
        if version[1] == base[1]
    ]
    exact = [private for version, private in found if version == base]
    if exact or not found:
        return exact[0] if exact else None
    return max(found, key=lambda one: one[0])[1]


def _held(slate: Slate, slot: int) -> Iterator[tuple[Version, Private]]:
    held = slate.held(slot)
    return unpack(held[1]) if held is not None else iter(())
