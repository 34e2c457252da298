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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from torchelastic import faults
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.layout import SHARED, Held, Memory, Version, checksum, own
from torchelastic.snapshot.messages import Sealed
from torchelastic.training.keeping_agent import Holder
from torchelastic.training.keeping_tree import SMALL, Flat, Layout, Staging, address_of, copy_out

log = logging.getLogger(__name__)

#: How long the commit that first needs memory waits for it. Later ones only look.
FIRST_WAIT = 2.0
#: How long a snapshot waits for the ledger to be written: no step is kept whose samples are not
#: known, unless the disk hangs.
LEDGER_PATIENCE = 5.0
#: Room is asked for in multiples of this.
_GRAIN = 64 << 10

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
    layout: Layout
    #: What is not copied yet: the tensors, where they go, and how often each has been written to.
    tensors: Sequence[torch.Tensor]
    places: Sequence[int]
    counts: Sequence[int]
    #: What is.
    staged: torch.Tensor
    #: Set when the tensors may be written to again.
    copied: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, version: Version, flat: Flat, staging: Staging) -> _Job:
        """Copies at once what is small, and what others than optimizers write."""
        lasting, passing = flat.lasting, flat.passing
        layout = Layout.of([one.nbytes for one in lasting], [one.nbytes for one in passing])
        small = [*zip(lasting, layout.lasting, strict=True)]
        large = [(one, at) for one, at in small if one.nbytes >= SMALL]
        small = [(one, at) for one, at in small if one.nbytes < SMALL]
        small.extend(zip(passing, layout.passing, strict=True))
        places = [at - layout.small_at for _, at in small]
        staging.copy([one for one, _ in small], places, layout.size - layout.small_at)
        tensors = [one for one, _ in large]
        counts = [one._version for one in tensors]
        places = [at for _, at in large]
        return cls(version, flat.skeleton, layout, tensors, places, counts, staging.block)

    def was_disturbed(self) -> bool:
        """Whether a tensor was written to since the commit: what was copied is worth nothing."""
        return any(
            tensor._version != count
            for tensor, count in zip(self.tensors, self.counts, strict=True)
        )


class Writer:
    """Writes the pieces of one worker, in one generation. Used by the thread that trains."""

    def __init__(
        self,
        holder: Holder,
        place: Place,
        before_seal: Callable[[float], bool] | None = None,
    ) -> None:
        self._holder, self._place, self._before_seal = holder, place, before_seal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torchelastic-keep")
        self._own = _Room(own(place.rank), holder, place, self._pool)
        self._shared = _Room(SHARED, holder, place, self._pool)
        self._staging = Staging()
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

    def check(self, held: Held) -> Future[bool]:
        """Whether a snapshot has the checksum it was sealed with, found out by the thread."""
        return self._pool.submit(held.is_whole)

    def drop(self, held: Held) -> None:
        """Forget a snapshot of the shared state, if it is in this node's own memory."""
        memory = self._shared.memory(len(held.data), len(held.skeleton))
        if memory is not None:
            memory.drop(held.version)

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
        job = _Job.of(version, flat, self._staging)
        memory = self._shared.memory(job.layout.size, len(job.skeleton))
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
        used = job.layout.size
        summed = checksum(data[:used])
        self._wait_for_ledger()
        self._seal(memory, job.version, job.skeleton, used, summed)
        if self._warmed is not memory:
            memory.warm()
            self._warmed = memory

    def _wait_for_ledger(self) -> None:
        if self._before_seal is not None and not self._before_seal(LEDGER_PATIENCE):
            self._before_seal = None
            log.warning(
                "The disk of the ledger hangs: snapshots do not wait for it any more, and the last "
                "lines may be missing after a failure."
            )

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


def _copy(job: _Job, begin: int) -> None:
    for tensor, place in zip(job.tensors, job.places, strict=True):
        copy_out(tensor, begin + place)
    if faults.planned:
        faults.at("snapshot.copy")
    copy_out(job.staged, begin + job.layout.small_at)


def _roomy(size: int) -> int:
    """Numbers in a skeleton grow: the same is asked for after a restart, so that it still fits."""
    return (size // _GRAIN + 2) * _GRAIN


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
            wanted = _roomy(size), _roomy(skeleton)
            self._asked = self._pool.submit(self._holder.room, self._piece, *wanted)
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
