"""The status page: memory of the agent that a worker writes to without a system call.

It outlives the worker. The agent reads the worker's progress and stalled time from it; the worker's
replacement reads the private state that died with it: random states, buffers, the position in the
data.

Layout: a page of header, then the slots. A slot is torn while its number is odd, and is written in
full before its number becomes even again: a worker killed in between leaves it recognisably torn.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass

from torchelastic.worker.collective_log import Collectives
from torchelastic.worker_counters import milestones, stalls

#: generation, step, time since which progress is expected (monotonic, the same for all processes of
#: a machine; infinite: it is not expected).
_PROGRESS = struct.Struct("=qqd")
#: The same, and when the step was entered.
_ENTERED = struct.Struct("=qqdd")
#: After that, once for a generation: the rank, and the stalled time until then.
_RANK = struct.Struct("=q")
_STALLED = struct.Struct(f"={len(stalls.COUNTED)}d")
_RANK_AT = _ENTERED.size
_BEFORE = slice(_RANK_AT + _RANK.size, _RANK_AT + _RANK.size + _STALLED.size)
#: With every step: the total stalled time.
_SINCE = slice(_BEFORE.stop, _BEFORE.stop + _STALLED.size)
#: Once for a generation: when its first step was entered, less what had been apart until then.
_BEGAN = struct.Struct("=d")
_BEGAN_AT = _SINCE.stop
#: With every step: samples trained so far.
_SAMPLES = struct.Struct("=q")
_SAMPLES_AT = _BEGAN_AT + _BEGAN.size
_READ = _SAMPLES_AT + _SAMPLES.size
#: Once for a generation: its first step.
_FIRST = struct.Struct("=q")
_FIRST_AT = _READ
#: Where steps are counted from outside (`worker.optimizer_steps`): those taken before.
_TAKEN = struct.Struct("=q")
_TAKEN_AT = _FIRST_AT + _FIRST.size
#: number, generation, step, bytes.
_SLOT = struct.Struct("=qqqq")
_NUMBER = struct.Struct("=q")

_HEADER = mmap.PAGESIZE
SLOTS = 5
#: The most bytes in a slot.
SLOT_LIMIT = 16 << 20


def create() -> int:
    """Create an empty status page; the caller owns the descriptor."""
    descriptor = os.memfd_create("torchelastic-status", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _HEADER + SLOTS * mmap.PAGESIZE)
    os.pwrite(descriptor, _ENTERED.pack(-1, -1, math.inf, 0.0), 0)
    return descriptor


def read_progress(descriptor: int) -> tuple[int, int, float]:
    """Read generation, step and time of the last entered step, without a mapping."""
    header = os.pread(descriptor, _PROGRESS.size, 0)
    if len(header) < _PROGRESS.size:  # the worker has truncated it: nothing is known
        return -1, -1, math.inf
    generation, step, at = _PROGRESS.unpack(header)
    return generation, step, at


def read_first_step(descriptor: int) -> int:
    """Read the first step of the worker's generation; call it after `read_progress`."""
    first = os.pread(descriptor, _FIRST.size, _FIRST_AT)
    return int(_FIRST.unpack(first)[0]) if len(first) == _FIRST.size else -1


def read_trained(descriptor: int) -> int:
    """Read the newest generation whose first step the worker has completed; -1: none."""
    generation, step, _ = read_progress(descriptor)
    return generation if step > read_first_step(descriptor) else -1


def read_taken(descriptor: int) -> int:
    """Read the last value of `StatusPage.taken_before`."""
    return int(_TAKEN.unpack(os.pread(descriptor, _TAKEN.size, _TAKEN_AT))[0])


@dataclass(frozen=True)
class Shown:
    """The content of a status page."""

    generation: int
    rank: int
    #: The last step it has entered, and when.
    step: int
    at: float
    #: Seconds of this generation, by kind (`stalls.KINDS`).
    stalled: tuple[float, ...]
    #: Seconds of its steps in this generation, without waiting for others.
    own: float = 0.0
    #: Samples that all ranks have trained on so far; -1: not counted.
    samples: int = -1
    #: As `Progress.before`.
    before: int | None = None


def read(descriptor: int) -> Shown:
    """Read the whole page without a mapping, like `read_progress`."""
    header = os.pread(descriptor, _READ, 0)
    if len(header) < _READ:  # the worker has truncated it: nothing is known
        return Shown(-1, -1, -1, 0.0, (0.0,) * len(stalls.KINDS))
    generation, step, _, at = _ENTERED.unpack_from(header, 0)
    (rank,) = _RANK.unpack_from(header, _RANK_AT)
    (began,) = _BEGAN.unpack_from(header, _BEGAN_AT)
    before, since = _STALLED.unpack(header[_BEFORE]), _STALLED.unpack(header[_SINCE])
    stalled = tuple(late - early for early, late in zip(before, since, strict=True))
    own = max(0.0, at - stalls.apart(since) - began)
    (samples,) = _SAMPLES.unpack_from(header, _SAMPLES_AT)
    return Shown(generation, rank, step, at, stalled[: len(stalls.KINDS)], own, samples)


@dataclass
class _Written:
    """The content of a slot, remembered by the process that wrote it."""

    begin: int
    number: int
    steady: bytes
    length: int
    #: The range of the changing part, and the size of both parts.
    span: slice
    size: int


class StatusPage:
    """One process's view of a status page. Does not own the descriptor it was made from."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._memory = self._map()
        #: The last collectives of the worker.
        self.collectives = Collectives(self._descriptor)
        #: By slot, the last content that this process wrote.
        self._written: dict[int, _Written] = {}
        #: The worker's rank in the generation that it enters next.
        self.rank = -1
        #: The generation of the last step that this process entered.
        self._generation: int | None = None
        #: When it became unhurried, less what had been apart until then.
        self._aside: float | None = None

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)

    def close(self) -> None:
        self._memory.close()
        self.collectives.close()
        os.close(self._descriptor)

    # --- progress --------------------------------------------------------------------------------

    def entered(self, generation: int, step: int) -> None:
        """Record that the worker enters a step now."""
        memory, now = self._memory, time.monotonic()
        if generation != self._generation:
            self._enter(generation, step, now)
        memory[_SINCE] = stalls.seconds
        _SAMPLES.pack_into(memory, _SAMPLES_AT, milestones.samples)
        _ENTERED.pack_into(memory, 0, generation, step, now, now)

    def _enter(self, generation: int, step: int, now: float) -> None:
        """Start a generation. Stalls before the last step of the old one count for the old one."""
        nothing = bytes(_STALLED.size)
        self._memory[_BEFORE] = self._memory[_SINCE] if self._generation is not None else nothing
        _RANK.pack_into(self._memory, _RANK_AT, self.rank)
        _FIRST.pack_into(self._memory, _FIRST_AT, step)
        _BEGAN.pack_into(self._memory, _BEGAN_AT, now - stalls.apart(stalls.seconds))
        self._generation, self._aside = generation, None

    def taken_before(self, steps: int) -> None:
        """Set the number of steps before the first counted one (`optimizer_steps`)."""
        _TAKEN.pack_into(self._memory, _TAKEN_AT, steps)

    def unhurried(self) -> None:
        """Expect no progress until the next `entered`: what follows may take any time."""
        generation, step, _ = _PROGRESS.unpack_from(self._memory, 0)
        _PROGRESS.pack_into(self._memory, 0, generation, step, math.inf)
        self._aside = time.monotonic() - stalls.apart(stalls.seconds)

    def hurried(self) -> None:
        """Expect progress again."""
        now = time.monotonic()
        generation, step, _ = _PROGRESS.unpack_from(self._memory, 0)
        _PROGRESS.pack_into(self._memory, 0, generation, step, now)
        if self._aside is not None:
            stalls.add(stalls.ASIDE, now - stalls.apart(stalls.seconds) - self._aside)
            self._aside = None

    # --- private state ---------------------------------------------------------------------------

    def publish(
        self, slot: int, version: tuple[int, int], changing: bytes, steady: bytes = b""
    ) -> bool:
        """Replace the content of the slot; False, without a change, if it is too large.

        The content is `steady` followed by `changing`. If `steady` is the same object as last time,
        it is not written again.
        """
        there = self._written.get(slot)
        if there is None or there.steady is not steady or there.length != len(changing):
            if len(steady) + len(changing) > SLOT_LIMIT:
                return False
            there = self._lay_out(slot, steady, len(changing))
        memory, begin, number = self._memory, there.begin, there.number
        _NUMBER.pack_into(memory, begin, number + 1)
        memory[there.span] = changing
        there.number = number + 2
        _SLOT.pack_into(memory, begin, number + 2, *version, there.size)
        return True

    def _lay_out(self, slot: int, steady: bytes, length: int) -> _Written:
        """Make room and write the steady part; the slot stays torn until all is written."""
        size = len(steady) + length
        begin = self._room(slot, size)
        number = _NUMBER.unpack_from(self._memory, begin)[0]
        number += number % 2
        _NUMBER.pack_into(self._memory, begin, number + 1)
        first = begin + _SLOT.size
        self._memory[first : first + len(steady)] = steady
        span = slice(first + len(steady), first + size)
        self._written[slot] = made = _Written(begin, number, steady, length, span, size)
        return made

    def held(self, slot: int) -> tuple[tuple[int, int], bytes] | None:
        """Return the version and the bytes of a slot; None if it is empty or torn."""
        begin = self._begin(slot)
        number, generation, step, size = _SLOT.unpack_from(self._memory, begin)
        if number == 0 or number % 2:
            return None
        at = begin + _SLOT.size
        return (generation, step), self._memory[at : at + size]

    def _begin(self, slot: int) -> int:
        return _HEADER + slot * ((len(self._memory) - _HEADER) // SLOTS)

    def _room(self, slot: int, size: int) -> int:
        """Make the slot large enough and return its offset.

        Growing moves the other slots. It never shrinks: a reader's mapping stays valid.
        """
        needed = _SLOT.size + size
        if needed > (len(self._memory) - _HEADER) // SLOTS:
            self._grow(-(-needed // mmap.PAGESIZE))
        return self._begin(slot)

    def _grow(self, pages: int) -> None:
        """Resize every slot to this number of pages."""
        held = [self.held(slot) for slot in range(SLOTS)]
        self._memory.close()
        os.ftruncate(self._descriptor, _HEADER + SLOTS * pages * mmap.PAGESIZE)
        self._memory = self._map()
        self._written.clear()
        for slot in range(SLOTS):
            _SLOT.pack_into(self._memory, self._begin(slot), 0, 0, 0, 0)
        for slot, content in enumerate(held):
            if content is not None:
                self.publish(slot, content[0], content[1])
