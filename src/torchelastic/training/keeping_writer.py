"""Writes snapshots into memory that the agent holds, behind the training's back.

A commit copies what is small at once. What is large, parameters and optimizer state, is copied by a
thread while the next forward and backward run: only `optimizer.step` writes to it, and waits
(`before_write`). The checksum comes after the copy, when nobody waits any more, then the seal.

What this rank alone has is little, and is sealed within the commit. So when one rank is killed,
every rank that has finished the same step has left its own piece of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from torchelastic import faults
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.layout import SHARED, Memory, Version, checksum, own
from torchelastic.snapshot.messages import Sealed
from torchelastic.training.keeping_agent import Holder
from torchelastic.training.keeping_tree import Flat, address_of, copy_out, offsets, total

log = logging.getLogger(__name__)

#: Tensors below this many bytes are copied at once: that costs less than to watch over them.
SMALL = 64 << 10
#: How long the commit that first needs memory waits for it. Later ones only look.
FIRST_WAIT = 2.0
#: What is asked for beyond what is needed, since numbers in a skeleton grow.
_SLACK = 16 << 10

#: What an own piece says of its bytes.
OWN_SKELETON = b'{"own":1}'


@dataclass(frozen=True)
class Place:
    """Who writes, and after which version its generation began."""

    rank: int
    size: int
    generation: int
    #: Whether this rank writes what is shared on its node.
    first: bool
    base: Version


@dataclass
class _Job:
    """A snapshot on its way."""

    version: Version
    skeleton: bytes
    tensors: Sequence[torch.Tensor]
    #: Those that are not copied yet, and how often each has been written to.
    watched: Sequence[torch.Tensor]
    counts: Sequence[int]
    #: Set when the tensors may be written to again.
    copied: threading.Event = field(default_factory=threading.Event)

    @property
    def sizes(self) -> list[int]:
        return [tensor.nbytes for tensor in self.tensors]

    def was_disturbed(self) -> bool:
        """Whether a tensor was written to since the commit: what was copied is worth nothing."""
        return any(
            tensor._version != count
            for tensor, count in zip(self.watched, self.counts, strict=True)
        )


class Writer:
    """Writes the pieces of one worker, in one generation. Used by the thread that trains."""

    def __init__(self, holder: Holder, place: Place) -> None:
        self._holder, self._place = holder, place
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torchelastic-keep")
        self._own = _Room(own(place.rank), holder, place, self._pool)
        self._shared = _Room(SHARED, holder, place, self._pool)
        self._job: _Job | None = None
        self._sealing: Future[None] | None = None
        #: Copy within the commit: in this job parameters are written to outside optimizer.step.
        self._at_once = False
        #: The memory whose other buffer needs no warming any more.
        self._warmed: Memory | None = None

    def publish(self, version: Version, flat: Flat | None, private: bytes) -> None:
        """Begin a snapshot; `flat` is None on a rank that writes no shared state."""
        self.finish()
        self._publish_own(version, private)
        if flat is not None:
            self._publish_shared(version, flat)

    def before_write(self) -> None:
        """Parameters are about to change: wait until they are copied."""
        if self._job is not None:
            self._job.copied.wait()
            self._job = None

    def finish(self) -> None:
        """Wait until the snapshot that was begun last is sealed."""
        if self._sealing is None:
            return
        sealing, self._sealing = self._sealing, None
        try:
            sealing.result()
        except Exception:  # a snapshot that fails is no reason to stop training
            log.exception("A snapshot could not be written: training goes on without.")
            self._shared.refuse()

    def close(self) -> None:
        self.finish()
        self._pool.shutdown()
        self._own.close()
        self._shared.close()

    def _publish_own(self, version: Version, private: bytes) -> None:
        memory = self._own.memory(len(private), len(OWN_SKELETON))
        if memory is not None:
            memory.begin(version)[: len(private)] = private
            self._seal(memory, version, OWN_SKELETON, len(private), checksum(private))

    def _publish_shared(self, version: Version, flat: Flat) -> None:
        job = _job(version, flat)
        memory = self._shared.memory(total(job.sizes), len(job.skeleton))
        if memory is None:
            return
        self._job = job
        self._sealing = self._pool.submit(self._write, memory, job)
        if self._at_once:
            self.before_write()

    # --- the thread ------------------------------------------------------------------------------

    def _write(self, memory: Memory, job: _Job) -> None:
        try:
            data = memory.begin(job.version)
            _copy(job, address_of(data))
            disturbed = job.was_disturbed()
        finally:
            job.copied.set()
        if disturbed:
            self._copy_at_once_from_now_on(job.version)
            return
        used = total(job.sizes)
        self._seal(memory, job.version, job.skeleton, used, checksum(data[:used]))
        if self._warmed is not memory:
            memory.warm()
            self._warmed = memory

    def _seal(
        self, memory: Memory, version: Version, skeleton: bytes, used: int, summed: int
    ) -> None:
        rank, size = self._place.rank, self._place.size
        memory.seal(version, skeleton, used, summed, rank=rank, size=size)
        piece = SHARED if skeleton is not OWN_SKELETON else own(rank)
        self._holder.tell(Sealed(piece, version))

    def _copy_at_once_from_now_on(self, version: Version) -> None:
        self._at_once = True
        log.warning(
            "Parameters or optimizer state were written to after commit() and before "
            "optimizer.step: the snapshot of step %d is void, and from now on commit() waits until "
            "all is copied. Writing to them before commit() saves the wait.",
            version[1],
        )


def _job(version: Version, flat: Flat) -> _Job:
    """What is small, and what others than optimizers write, is copied now."""
    tensors, watched = [], []
    for tensor in flat.lasting:
        if tensor.nbytes < SMALL:
            tensors.append(tensor.clone())
        else:
            tensors.append(tensor)
            watched.append(tensor)
    tensors.extend(tensor.clone() for tensor in flat.passing)
    return _Job(version, flat.skeleton, tensors, watched, [one._version for one in watched])


def _copy(job: _Job, begin: int) -> None:
    half = len(job.tensors) // 2
    for number, (tensor, offset) in enumerate(zip(job.tensors, offsets(job.sizes), strict=True)):
        if number == half and faults.planned:
            faults.at("snapshot.copy")
        copy_out(tensor, begin + offset)


class _Room:
    """The memory for one piece: asked for when it is needed, and not waited for twice."""

    def __init__(self, piece: str, holder: Holder, place: Place, pool: ThreadPoolExecutor) -> None:
        self._piece, self._holder, self._place, self._pool = piece, holder, place, pool
        self._memory: Memory | None = None
        self._asked: Future[Memory] | None = None
        self._refused = False

    def memory(self, size: int, skeleton: int) -> Memory | None:
        """Memory that this fits into; None if there is none, or none yet."""
        if self._refused or self._fits(size, skeleton):
            return self._memory
        if self._asked is None:
            wanted = self._piece, size + _SLACK, 2 * skeleton + _SLACK
            self._asked = self._pool.submit(self._holder.room, *wanted)
            wait([self._asked], FIRST_WAIT)
        if not self._asked.done():
            return None
        self._take(self._asked)
        self._asked = None
        return self._memory if self._fits(size, skeleton) else None

    def refuse(self) -> None:
        """There is no memory any more."""
        self._refused = True
        self.close()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _fits(self, size: int, skeleton: int) -> bool:
        if self._memory is None:
            return False
        has = self._memory.sizes
        return size <= has.bytes and skeleton <= has.skeleton

    def _take(self, asked: Future[Memory]) -> None:
        self.close()
        try:
            self._memory = asked.result()
        except SnapshotError as error:
            self.refuse()
            log.warning("Training goes on without snapshots of '%s': %s", self._piece, error)
            return
        self._memory.settle(self._place.base, self._place.generation)
