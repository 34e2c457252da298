"""Rank-private state: random states and buffers, which are lost with a rank unless it saves them.

A rank saves them in its status page, the agent's memory, without a system call. The replacement of
a rank that is in step m may need its state
    at the beginning of m - 1   if it was ahead: its peers have not got out of step m - 1;
    at the beginning of m       in the ordinary case;
    at the end of m             if its peers have finished m: then it had taken part in all of m's
                                collectives, and what it had drawn before the last is what counts.
So before each collective of step m it saves its state for the end of m, in one of three slots in
turn. Usually this equals its state at the beginning of m + 1; if not, it saves that in one of two
more slots. If it is killed while it writes, the torn slot is not needed: no rank reaches the end of
m before the collective is launched.
"""

from __future__ import annotations

import logging
import struct
from typing import NamedTuple, Protocol

from torchelastic.tensors import rng
from torchelastic.tensors.buffers import Buffers

log = logging.getLogger(__name__)

Version = tuple[int, int]

#: The lengths of torch's state and of the buffers, which come last.
_HEAD = struct.Struct("=2q")
_IN_FLIGHT = (0, 1, 2)
_BEGIN = (3, 4)


class StatusPageBuffers(Protocol):
    """The part of `worker.status_page.StatusPage` used here."""

    def publish(
        self, slot: int, version: Version, changing: bytes, steady: bytes = b""
    ) -> bool: ...

    def held(self, slot: int) -> tuple[Version, bytes] | None: ...


class Private(NamedTuple):
    """The private state of a rank at one moment."""

    random: rng.Random
    buffers: bytes


class PrivateStateReader:
    """Reads the private state of this rank."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._last = Private(rng.Random(b"", b""), b"")

    def read(self) -> Private:
        """Return the current state; the same object as before if nothing has changed."""
        last = self._last
        random = rng.capture()
        buffers = self._buffers.capture() if self._buffers.light else b""
        if random is not last[0] or buffers != last[1]:
            self._last = last = tuple.__new__(Private, (random, buffers))
        return last


def restore(private: Private, buffers: Buffers) -> bool:
    """Put it back; return False, leaving the buffers, if they are of another model."""
    rng.restore(private.random)
    return buffers.restore(private.buffers)


class Publisher:
    """Saves this rank's private state in its status page."""

    def __init__(self, status_page: StatusPageBuffers) -> None:
        self._status_page = status_page
        self._left: tuple[Version, Private] | None = None
        #: The packed part that seldom changes, and what it was made of.
        self._steady, self._made_of = b"", (b"", 0, 0)
        self._with_buffers = True

    def begin(self, version: Version, private: Private) -> None:
        """Begin a step. Writes nothing if no random number was drawn since the last collective."""
        if self._left != (version, private):
            self._publish(_BEGIN[version[1] % 2], version, private)

    def in_flight(self, version: Version, private: Private) -> None:
        """Save before a collective is launched; `version` is that of the step's end."""
        left = version, private
        if self._left != left:
            self._publish(_IN_FLIGHT[version[1] % 3], version, private)
            self._left = left

    def _publish(self, slot: int, version: Version, private: Private) -> None:
        (changing, others), buffers = private
        made_of = others, len(changing), len(buffers)
        if buffers:
            if self._with_buffers:
                changing += buffers
            else:
                made_of = others, len(changing), 0
        if made_of != self._made_of:
            self._made_of, self._steady = made_of, _HEAD.pack(*made_of[1:]) + others
        written = self._status_page.publish(slot, version, changing, self._steady)
        if not written and self._with_buffers:
            self._with_buffers = False
            log.warning(
                "The model's buffers are too large to keep a copy for this rank. A worker that "
                "replaces it takes another rank's buffers."
            )
            self._publish(slot, version, private)


def pack(private: Private) -> bytes:
    """Return it as bytes for `unpack`."""
    (torch, others), buffers = private
    return b"".join((_HEAD.pack(len(torch), len(buffers)), others, torch, buffers))


def unpack(data: bytes) -> Private:
    torch, buffers = _HEAD.unpack_from(data)
    end = len(data) - buffers
    begin = end - torch
    return Private(rng.Random(data[begin:end], data[_HEAD.size : begin]), data[end:])


def left_behind(
    status_page: StatusPageBuffers, base: Version, *, was_skipped: bool = False
) -> Private | None:
    """Return the private state that the previous worker of this status page saved for `base`. If
    the step before was skipped, that is what it began with: what was in flight is void.

    If it died before the first step of a generation, that generation's number is on the same step,
    so the latest with this step is right. Of two, the one from the beginning of the step is exact.
    """
    found = []
    for slot in (*_IN_FLIGHT, *_BEGIN):
        held = status_page.held(slot)
        if held is None:
            continue
        is_void = was_skipped and slot in _IN_FLIGHT and held[0][1] == base[1]
        if base[1] - was_skipped <= held[0][1] <= base[1] and not is_void:
            found.append((held[0] == base, held[0], slot, held[1]))
    return unpack(max(found)[-1]) if found else None
