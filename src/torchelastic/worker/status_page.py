"""The status page: memory of the agent that a worker writes to without a system call.

It outlives the worker. The agent reads the worker's progress and stalled time from it; the worker's
replacement reads the private state that died with it: random states, buffers, the position in the
data.

Layout: a page of header, then the slots. A slot is torn while its number is odd, and is written in
full before its number becomes even again: a worker killed in between leaves it recognisably torn.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

from torchelastic.system.shared_memory import PAGE, Field, map_memory, paged
from torchelastic.system.shared_memory import create as create_memory
from torchelastic.worker.collective_log import Collectives
from torchelastic.worker_counters import milestones, stalls

#: generation, step, time since which progress is expected (monotonic, the same for all processes of
#: a machine; infinite: it is not expected).
_PROGRESS = Field("=qqd")
#: The same, and when the step was entered.
_ENTERED = Field("=qqdd")
#: After that, once for a generation: the rank, and the stalled time until then.
_RANK = Field("=q", _ENTERED.end)
_BEFORE = Field(f"={len(stalls.COUNTED)}d", _RANK.end)
#: With every step: the total stalled time.
_SINCE = Field(f"={len(stalls.COUNTED)}d", _BEFORE.end)
#: Once for a generation: when its first step was entered, less what had been apart until then.
_BEGAN = Field("=d", _SINCE.end)
#: With every step: samples trained so far.
_SAMPLES = Field("=q", _BEGAN.end)
#: With every step: micro-batches that it ran of the step before.
_SHARE = Field("=q", _SAMPLES.end)
_READ = _SHARE.end
#: Once for a generation: its first step.
_FIRST = Field("=q", _READ)
#: Where steps are counted from outside (`worker.optimizer_steps`): those taken before.
_TAKEN = Field("=q", _FIRST.end)
#: Written by the agent: until when its node holds its lease (monotonic).
_LEASE = Field("=d", _TAKEN.end)
#: In a slot: number, generation, step, bytes. The number alone is written first.
_SLOT = Field("=qqqq")
_NUMBER = Field("=q")

_HEADER = PAGE
SLOTS = 5
#: The most bytes in a slot.
SLOT_LIMIT = 16 << 20


def create() -> int:
    """Create an empty status page; the caller owns the descriptor."""
    descriptor = create_memory("status", _HEADER + SLOTS * PAGE)
    os.pwrite(descriptor, _ENTERED.pack(-1, -1, math.inf, 0.0), 0)
    write_lease(descriptor, math.inf)
    return descriptor


def write_lease(descriptor: int, until: float) -> None:
    """As the agent: write until when the node holds its lease."""
    os.pwrite(descriptor, _LEASE.pack(until), _LEASE.at)


def read_progress(descriptor: int) -> tuple[int, int, float]:
    """Read generation, step and time of the last entered step, without a mapping."""
    # None: the worker has truncated it, and nothing is known.
    generation, step, at = _PROGRESS.read(descriptor) or (-1, -1, math.inf)
    return generation, step, at


def read_first_step(descriptor: int) -> int:
    """Read the first step of the worker's generation; call it after `read_progress`."""
    (first,) = _FIRST.read(descriptor) or (-1,)
    return int(first)


def read_trained(descriptor: int) -> int:
    """Read the newest generation whose first step the worker has completed; -1: none."""
    generation, step, _ = read_progress(descriptor)
    return generation if step > read_first_step(descriptor) else -1


def read_taken(descriptor: int) -> int:
    """Read the last value of `StatusPage.taken_before`."""
    (taken,) = _TAKEN.read(descriptor) or (0,)
    return int(taken)


@dataclass(frozen=True)
class ShownStatus:
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
    #: Micro-batches that it ran of its last step; -1: not counted.
    share: int = -1
    #: As `Progress.before`.
    before: int | None = None


def read(descriptor: int) -> ShownStatus:
    """Read the whole page without a mapping, like `read_progress`."""
    header = os.pread(descriptor, _READ, 0)
    if len(header) < _READ:  # the worker has truncated it: nothing is known
        return ShownStatus(-1, -1, -1, 0.0, (0.0,) * len(stalls.KINDS))
    generation, step, _, at = _ENTERED.of(header)
    (rank,), (began,) = _RANK.of(header), _BEGAN.of(header)
    (samples,), (share,) = _SAMPLES.of(header), _SHARE.of(header)
    before, since = _BEFORE.of(header), _SINCE.of(header)
    stalled = tuple(late - early for early, late in zip(before, since, strict=True))
    own = max(0.0, at - stalls.apart(since) - began)
    kinds = stalled[: len(stalls.KINDS)]
    return ShownStatus(generation, rank, step, at, kinds, own, samples, share)


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
        self._memory = map_memory(self._descriptor)
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

    def close(self) -> None:
        self._memory.close()
        self.collectives.close()
        os.close(self._descriptor)

    def is_leased(self) -> bool:
        """Return whether the node holds its lease, so that the worker may enter a step."""
        (until,) = _LEASE.of(self._memory)
        return time.monotonic() < float(until)

    # --- progress --------------------------------------------------------------------------------

    def entered(self, generation: int, step: int) -> None:
        """Record that the worker enters a step now."""
        memory, now = self._memory, time.monotonic()
        if generation != self._generation:
            self._enter(generation, step, now)
        memory[_SINCE.span] = stalls.seconds
        _SAMPLES.pack_into(memory, _SAMPLES.at, milestones.samples)
        _SHARE.pack_into(memory, _SHARE.at, milestones.micro_batches)
        _ENTERED.pack_into(memory, 0, generation, step, now, now)

    def _enter(self, generation: int, step: int, now: float) -> None:
        """Start a generation. Stalls before the last step of the old one count for the old one."""
        memory, nothing = self._memory, bytes(_SINCE.size)
        memory[_BEFORE.span] = memory[_SINCE.span] if self._generation is not None else nothing
        _RANK.pack_into(memory, _RANK.at, self.rank)
        _FIRST.pack_into(memory, _FIRST.at, step)
        _BEGAN.pack_into(memory, _BEGAN.at, now - stalls.apart(stalls.seconds))
        self._generation, self._aside = generation, None

    def taken_before(self, steps: int) -> None:
        """Set the number of steps before the first counted one (`optimizer_steps`)."""
        _TAKEN.pack_into(self._memory, _TAKEN.at, steps)

    def unhurried(self) -> None:
        """Expect no progress until the next `entered`: what follows may take any time."""
        generation, step, _ = _PROGRESS.of(self._memory)
        _PROGRESS.pack_into(self._memory, 0, generation, step, math.inf)
        self._aside = time.monotonic() - stalls.apart(stalls.seconds)

    def hurried(self) -> None:
        """Expect progress again."""
        now = time.monotonic()
        generation, step, _ = _PROGRESS.of(self._memory)
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
        number = _NUMBER.of(self._memory, begin)[0]
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
        number, generation, step, size = _SLOT.of(self._memory, begin)
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
            self._grow(paged(needed))
        return self._begin(slot)

    def _grow(self, size: int) -> None:
        """Resize every slot to this size in whole pages."""
        held = [self.held(slot) for slot in range(SLOTS)]
        self._memory.close()
        os.ftruncate(self._descriptor, _HEADER + SLOTS * size)
        self._memory = map_memory(self._descriptor)
        self._written.clear()
        for slot in range(SLOTS):
            _SLOT.pack_into(self._memory, self._begin(slot), 0, 0, 0, 0)
        for slot, content in enumerate(held):
            if content is not None:
                self.publish(slot, content[0], content[1])
