"""Writes snapshots into the agent's memory, in parallel with training.

A commit copies small tensors at once. A thread copies the large ones, parameters and optimizer
state, while the next forward and backward run: only `optimizer.step` writes to them, and waits for
the copy (`before_write`). The checksum and the seal come after the copy, when nothing waits.

A rank's private state is small and is sealed within the commit. So when one rank is killed, every
rank that has finished the same step has left its own piece of it.

Shards are large, so this does not hold for them, and they are useless unless all ranks have the
same version. So ranks vote in every commit (`Standing`): a version of shards is begun only when the
one before is sealed by all ranks and copied to other nodes. Steps until then have no snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from torchelastic import faults
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import SnapshotAgent, Unanswered
from torchelastic.snapshot.layout import SHARED, Held, Memory, Version, checksum, own, shard
from torchelastic.snapshot.messages import Sealed
from torchelastic.snapshot.state_tree import Flat, Layout, Staging
from torchelastic.tensors.tensor_bytes import SMALL, address_of, copy_out
from torchelastic.torch_private import version_of
from torchelastic.worker_counters import stalls

log = logging.getLogger(__name__)

#: Seconds that the first commit waits for memory. Later ones do not wait.
FIRST_WAIT = 2.0
#: Seconds that a snapshot waits for the ledger, so that it holds no step whose samples are not
#: recorded, unless the disk is hung.
LEDGER_PATIENCE = 5.0
#: Seconds that shards wait for their copies on other nodes before we warn and continue.
REPLICA_PATIENCE = 120.0
#: Memory is requested in multiples of this many bytes.
_GRAIN = 64 << 10

#: The skeleton of an own piece.
OWN_SKELETON = b'{"own":1}'


@dataclass(frozen=True)
class Place:
    """The writing rank, and the version that its generation began with."""

    rank: int
    size: int
    generation: int
    #: Whether this rank writes its node's shared state.
    first: bool
    base: Version


class Standing(IntEnum):
    """The status of a rank's shards of the last version; the lowest of all ranks counts."""

    #: There is no memory for them: no rank writes shards any more.
    NEVER = -1
    #: They were not written: the others' are useless, and the next version replaces them.
    FAILED = 0
    #: They are being written here or copied to other nodes.
    PENDING = 1
    DONE = 2


@dataclass
class _Job:
    """A snapshot of a piece in progress."""

    target: _PieceMemory
    version: Version
    skeleton: bytes
    layout: Layout
    #: To copy: the tensors, their destinations, and the count of writes to each.
    tensors: Sequence[torch.Tensor]
    places: Sequence[int]
    watched: Sequence[torch.Tensor]
    counts: Sequence[int]
    #: Already copied.
    staged: torch.Tensor
    #: Set when the tensors may be written to again.
    copied: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, target: _PieceMemory, version: Version, flat: Flat, layout: Layout) -> _Job:
        """Begin a snapshot: copy at once small tensors and those not written by optimizers."""
        lasting, passing = flat.lasting, flat.passing
        small = [*zip(lasting, layout.lasting, strict=True)]
        large = [(one, at) for one, at in small if one.nbytes >= SMALL]
        small = [(one, at) for one, at in small if one.nbytes < SMALL]
        small.extend(zip(passing, layout.passing, strict=True))
        places = [at - layout.small_at for _, at in small]
        target.staging.copy([one for one, _ in small], places, layout.size - layout.small_at)
        tensors = [one for one, _ in large]
        watched = tensors if flat.watched is None else flat.watched
        counts = [version_of(one) for one in watched]
        places = [at for _, at in large]
        block = target.staging.block
        made = cls(target, version, flat.skeleton, layout, tensors, places, watched, counts, block)
        if not tensors:
            made.copied.set()
        return made

    def was_disturbed(self) -> bool:
        """Return whether a tensor was written to since the commit, which voids the copy."""
        return any(
            version_of(tensor) != count
            for tensor, count in zip(self.watched, self.counts, strict=True)
        )


class Writer:
    """Writes the pieces of one worker, in one generation. Used by the training thread."""

    def __init__(
        self,
        agent: SnapshotAgent,
        place: Place,
        before_seal: Callable[[float], bool] | None = None,
    ) -> None:
        self._agent, self._place, self._before_seal = agent, place, before_seal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torchelastic-keep")
        self._own = _PieceMemory(own(place.rank), agent, place, self._pool)
        self._shared = _PieceMemory(SHARED, agent, place, self._pool)
        self._shards = _PieceMemory(shard(place.rank), agent, place, self._pool)
        #: Snapshots in progress: those not copied yet, and those not sealed yet.
        self._copying: list[_Job] = []
        self._sealing: list[tuple[_Job, Future[None]]] = []
        #: The version of the shards that was begun last, and when.
        self._latest: tuple[Version, float] | None = None
        self._late = False
        #: The pending check of the snapshot that this generation began with.
        self._checked: Future[bool] | None = None
        #: Copy within the commit: this job writes to parameters outside optimizer.step.
        self._at_once = False

    @property
    def keeps_shared(self) -> bool:
        """Whether this rank writes shared state, unless it was refused memory."""
        return self._place.first and not self._shared.is_refused

    def publish(
        self, version: Version, flat: Flat | None, private: bytes, shards: Flat | None = None
    ) -> None:
        """Begin a snapshot; `flat` is None on a rank that does not write shared state."""
        self.finish()
        self._publish_own(version, private)
        # Before the shared piece: where that is found, its writer's shards are too.
        if shards is not None:
            self._latest = version, time.monotonic()
            self._publish(self._shards, version, shards)
        if flat is not None:
            self._publish(self._shared, version, flat)
        if self._at_once:
            self._wait_for_copies()

    # --- shards ----------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """Return the status of this rank's shards of the last version begun."""
        if self._shards.is_refused or self._shared.is_refused:
            return Standing.NEVER
        if self._latest is None:
            return Standing.DONE
        if not all(sealing.done() for _, sealing in self._sealing):
            return Standing.PENDING
        self.finish()
        (version, began), targets = self._latest, [self._shards]
        if self._place.first:
            targets.append(self._shared)
        if not all(target.holds(version) for target in targets):
            return Standing.FAILED
        if self._shards.is_replicated(version) or time.monotonic() > began + REPLICA_PATIENCE:
            self._tell_late(not self._shards.is_replicated(version))
            return Standing.DONE
        self._agent.tell(Sealed(self._shards.piece, version))  # in case it was not heard
        return Standing.PENDING

    def may_begin(self, least: Standing) -> bool:
        """Return whether all ranks begin a version of shards, given the lowest standing."""
        if least == Standing.NEVER and not self._shards.is_refused:
            self._shards.refuse()
            log.warning(
                "Some ranks have no memory for their shards: training continues without snapshots."
            )
        if least == Standing.FAILED and self._latest is not None:
            self._shards.drop(self._latest[0])
            self._shared.drop(self._latest[0])
        return least in (Standing.FAILED, Standing.DONE)

    def _tell_late(self, late: bool) -> None:
        if late and not self._late:
            log.warning(
                "No other node has copied this rank's shards for %d seconds. If this node is lost, "
                "training since the last copy is lost too.",
                REPLICA_PATIENCE,
            )
        self._late = late

    # --- around a snapshot -----------------------------------------------------------------------

    def check(self, held: Held) -> None:
        """Verify a snapshot's checksum in the thread."""
        self._checked = self._pool.submit(held.is_whole)

    def is_whole(self, held: Held) -> bool:
        """Return the result of `check`. The agent drops a damaged snapshot before any rank can
        restore it again."""
        if self._checked is None or self._checked.result():
            return True
        try:
            self._agent.drop(SHARED, held.version)
        except SnapshotError as error:
            log.error(
                "Could not drop a damaged snapshot of step %d; it may be found again: %s",
                held.version[1],
                error,
            )
        return False

    def before_write(self) -> None:
        """Wait until the parameters are copied: they are about to change."""
        if self._copying:
            with stalls.Counted("snapshot"):
                self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        for job in self._copying:
            job.copied.wait()
        self._copying.clear()

    def finish(self) -> None:
        """Wait until the last snapshot begun is sealed."""
        under_way, self._sealing = self._sealing, []
        for job, sealing in under_way:
            try:
                sealing.result()
            except Exception:  # a failed snapshot must not stop training
                log.exception("Could not write a snapshot; training continues without it.")
                job.target.refuse()

    def close(self) -> None:
        self.finish()
        self._pool.shutdown()
        for target in (self._own, self._shared, self._shards):
            target.close()

    def _publish_own(self, version: Version, private: bytes) -> None:
        memory = self._own.memory(len(private), len(OWN_SKELETON))
        if memory is not None:
            memory.begin(version)[: len(private)] = private
            summed = checksum(private)
            self._seal(self._own, memory, version, OWN_SKELETON, len(private), summed)

    def _publish(self, target: _PieceMemory, version: Version, flat: Flat) -> None:
        sizes = [one.nbytes for one in flat.lasting], [one.nbytes for one in flat.passing]
        layout = Layout.of(*sizes)
        memory = target.memory(layout.size, len(flat.skeleton))
        if memory is not None:
            job = _Job.of(target, version, flat, layout)
            self._copying.append(job)
            self._sealing.append((job, self._pool.submit(self._write, memory, job)))

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
        self._seal(job.target, memory, job.version, job.skeleton, used, summed)
        job.target.warm(memory)

    def _wait_for_ledger(self) -> None:
        if self._before_seal is not None and not self._before_seal(LEDGER_PATIENCE):
            self._before_seal = None
            log.warning(
                "The ledger's disk is hung: snapshots no longer wait for it, and the ledger may "
                "miss its last lines after a failure."
            )

    def _seal(
        self,
        target: _PieceMemory,
        memory: Memory,
        version: Version,
        skeleton: bytes,
        used: int,
        summed: int,
    ) -> None:
        rank, size = self._place.rank, self._place.size
        memory.seal(version, skeleton, used, summed, rank=rank, size=size)
        self._agent.tell(Sealed(target.piece, version))

    def _copy_at_once_from_now_on(self, version: Version) -> None:
        self._at_once = True
        log.warning(
            "Parameters or optimizer state changed between commit() and optimizer.step: the "
            "snapshot of step %d is void, and from now on commit() waits until the copy is done. "
            "To avoid the wait, change them before commit().",
            version[1],
        )


def _copy(job: _Job, begin: int) -> None:
    for tensor, place in zip(job.tensors, job.places, strict=True):
        copy_out(tensor, begin + place)
    if faults.planned:
        faults.at("snapshot.copy")
    copy_out(job.staged, begin + job.layout.small_at)


def _rounded_up(size: int) -> int:
    """Round up: numbers in a skeleton grow, and the memory must still fit after a restart."""
    return (size // _GRAIN + 2) * _GRAIN


class _PieceMemory:
    """The memory for one piece: requested when needed; only the first commit waits for it."""

    def __init__(
        self, piece: str, agent: SnapshotAgent, place: Place, pool: ThreadPoolExecutor
    ) -> None:
        self.piece, self._agent, self._place, self._pool = piece, agent, place, pool
        self.staging = Staging()
        self._memory: Memory | None = None
        self._asked: Future[Memory] | None = None
        #: Whether the last request timed out.
        self._is_late = False
        self.is_refused = False
        #: The memory whose other buffer needs no warming any more.
        self._warmed: Memory | None = None

    def memory(self, size: int, skeleton: int) -> Memory | None:
        """Return memory of this size, or None if there is none (yet)."""
        if self.is_refused or self._fits(size, skeleton):
            return self._memory
        if self._asked is None:
            wanted = _rounded_up(size), _rounded_up(skeleton)
            self._asked = self._pool.submit(self._agent.request_memory, self.piece, *wanted)
            if not self._is_late:
                wait([self._asked], FIRST_WAIT)
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        self._take(asked)
        return self._memory if self._fits(size, skeleton) else None

    def holds(self, version: Version) -> bool:
        return self._memory is not None and self._memory.find(version) is not None

    def is_replicated(self, version: Version) -> bool:
        """Return whether other nodes have their copies, or none are wanted."""
        noted = self._memory.replicated() if self._memory is not None else None
        return noted is not None and noted >= version

    def drop(self, version: Version) -> None:
        if self._memory is not None:
            self._memory.drop(version)

    def warm(self, memory: Memory) -> None:
        if self._warmed is not memory:
            memory.warm()
            self._warmed = memory

    def refuse(self) -> None:
        """Stop using memory for this piece."""
        self.is_refused = True
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
        except Unanswered:
            self._is_late = True
            log.warning("No memory for snapshots of '%s' yet; asking again.", self.piece)
            return
        except SnapshotError as error:
            self.refuse()
            log.warning("Training continues without snapshots of '%s': %s", self.piece, error)
            return
        self._memory.settle(self._place.base, self._place.generation)
