"""The slate: memory of the agent's that a resident worker writes to, without a system call.

It outlives the worker. The agent reads from it how far the worker has got and when; the worker's
replacement reads what died with it: random states, buffers, the position in the data.

Layout: a page of header, then two slots. A slot is torn while its number is odd, and is written in
full before its number becomes even again: a worker killed in between leaves it recognisably torn.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Sequence

#: generation, step, when it was entered (monotonic, the same for all processes of a machine).
_PROGRESS = struct.Struct("=qqd")
#: number, generation, step, bytes.
_SLOT = struct.Struct("=qqqq")

_HEADER = mmap.PAGESIZE
SLOTS = 2
#: What a slot may hold; more than this is no small state.
SLOT_LIMIT = 16 << 20


def create() -> int:
    """A new, empty slate; the descriptor is the caller's."""
    descriptor = os.memfd_create("torchelastic-slate", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _HEADER + SLOTS * mmap.PAGESIZE)
    os.pwrite(descriptor, _PROGRESS.pack(-1, -1, math.inf), 0)
    return descriptor


def read_progress(descriptor: int) -> tuple[int, int, float]:
    """What the worker with this slate has entered last, for an agent that keeps no mapping."""
    generation, step, at = _PROGRESS.unpack(os.pread(descriptor, _PROGRESS.size, 0))
    return generation, step, at


class Slate:
    """One process's view of a slate. Does not own the descriptor it was made from."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._memory = self._map()

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)

    # --- progress --------------------------------------------------------------------------------

    def entered(self, generation: int, step: int) -> None:
        """The worker enters a step now."""
        _PROGRESS.pack_into(self._memory, 0, generation, step, time.monotonic())

    def unhurried(self) -> None:
        """What follows may take any time: nobody expects progress before the next `entered`."""
        generation, step, _ = _PROGRESS.unpack_from(self._memory, 0)
        _PROGRESS.pack_into(self._memory, 0, generation, step, math.inf)

    def hurried(self) -> None:
        """It does not any more."""
        generation, step, _ = _PROGRESS.unpack_from(self._memory, 0)
        _PROGRESS.pack_into(self._memory, 0, generation, step, time.monotonic())

    # --- private state ---------------------------------------------------------------------------

    def publish(
        self, slot: int, version: tuple[int, int], pieces: Sequence[bytes | memoryview]
    ) -> bool:
        """Replace what the slot holds; False, and nothing is held, when it is too much."""
        size = sum(len(piece) for piece in pieces)
        if size > SLOT_LIMIT:
            return False
        begin = self._room(slot, size)
        number = _SLOT.unpack_from(self._memory, begin)[0] | 1
        _SLOT.pack_into(self._memory, begin, number, *version, size)
        at = begin + _SLOT.size
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        _SLOT.pack_into(self._memory, begin, number + 1, *version, size)
        return True

    def held(self, slot: int) -> tuple[tuple[int, int], bytes] | None:
        """The version and the bytes a slot holds; None if it holds nothing whole."""
        begin = self._begin(slot)
        number, generation, step, size = _SLOT.unpack_from(self._memory, begin)
        if number == 0 or number % 2:
            return None
        at = begin + _SLOT.size
        return (generation, step), self._memory[at : at + size]

    def _begin(self, slot: int) -> int:
        return _HEADER + slot * ((len(self._memory) - _HEADER) // SLOTS)

    def _room(self, slot: int, size: int) -> int:
        """Where the slot begins, after making it large enough.

        Growing moves the second slot. It never shrinks: a reader's mapping stays valid.
        """
        needed = _SLOT.size + size
        if needed > (len(self._memory) - _HEADER) // SLOTS:
            pages = -(-needed // mmap.PAGESIZE)
            moved = self.held(1)
            self._memory.close()
            os.ftruncate(self._descriptor, _HEADER + SLOTS * pages * mmap.PAGESIZE)
            self._memory = self._map()
            _SLOT.pack_into(self._memory, self._begin(1), 0, 0, 0, 0)
            if moved is not None:
                self.publish(1, moved[0], [moved[1]])
        return self._begin(slot)
