"""Writes snapshots into the agent's memory, in parallel with training.

A commit copies small tensors at once. A thread copies the large ones, parameters and optimizer
state, while the next forward and backward run: only `optimizer.step` writes to them, and waits for
the copy (`before_write`). The checksum and the seal come after the copy, when nothing waits.

A rank's private state is small and is sealed within the commit. So when one rank is killed, every
rank that has finished the same step has left its own piece of it.

Shards are large, so this does not hold for them, and they are useless unless all ranks have the
same version. So ranks vote in every commit (`ShardStatus`): a version of shards is begun only when
the one before is sealed by all ranks and copied to other nodes. Steps until then have no snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import IntEnum

import torch

from torchelastic import faults
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import SnapshotRequests, Unanswered
from torchelastic.snapshot.layout import (
    SHARED,
    Memory,
    SealedVersion,
    Version,
    checksum,
    own,
    shard,
)
from torchelastic.snapshot.messages import Sealed
from torchelastic.tensors.tensor_bytes import (
    SMALL,
    BackgroundCopy,
    Flat,
    Layout,
    SmallCopies,
    address_of,
    copy_out,
)
from torchelastic.worker_counters import stalls

log = logging.getLogger(__name__)

#: Seconds that the first commit waits for memory. Later ones do not wait.
FIRST_MEMORY_TIMEOUT = 2.0
#: Seconds that a snapshot waits for the ledger, so that it holds no step whose samples are not
#: recorded, unless the disk is hung.
LEDGER_TIMEOUT = 5.0
#: Seconds that shards wait for their copies on other nodes before we warn and continue.
REPLICA_TIMEOUT = 120.0
#: Memory is requested in multiples of this many bytes.
_ROUND_UP_TO = 64 << 10

#: The skeleton of an own piece.
OWN_SKELETON = b'{"own":1}'


@dataclass(frozen=True)
class WriterPlace:
    """The writing rank, and the version that its generation began with."""

    rank: int
    size: int
    generation: int
    #: Whether this rank writes its node's shared state.
    first: bool
    base: Version


class ShardStatus(IntEnum):
    """The status of a rank's shards of the last version; the lowest of all ranks counts."""

    #: There is no memory for them: no rank writes shards any more.
    NEVER = -1
    #: They were not written: the others' are useless, and the next version replaces them.
    FAILED = 0
    #: They are being written here or copied to other nodes.
    PENDING = 1
    DONE = 2


class _Plan:
    """The places of a state's tensors in a buffer, made once for many snapshots."""

    def __init__(self, lasting: Sequence[torch.Tensor], passing: Sequence[int]) -> None:
        """`passing` are the sizes of the passing tensors."""
        self._lasting, self._passing = lasting, passing
        self.layout = layout = Layout.of([one.nbytes for one in lasting], passing)
        places = [*zip(lasting, layout.lasting, strict=True)]
        #: The lasting tensors that are copied in the background, and at once; with their offsets.
        self.large = [place for place in places if place[0].nbytes >= SMALL]
        self.small = [place for place in places if place[0].nbytes < SMALL]

    def is_of(self, lasting: Sequence[torch.Tensor], passing: Sequence[int]) -> bool:
        """Return whether it was made of these tensors: the very same sequence (`Tree` and `Shards`
        make another if any of them changes), and passing ones of these sizes."""
        return lasting is self._lasting and passing == self._passing


class _Job:
    """A snapshot of a piece in progress."""

    def __init__(
        self, target: _PieceMemory, memory: Memory, version: Version, flat: Flat, plan: _Plan
    ) -> None:
        """Begin a snapshot: copy at once small tensors and those not written by optimizers."""
        self.target, self.memory, self.version = target, memory, version
        self.skeleton, self.layout = flat.skeleton, plan.layout
        #: The buffer to write to, once the copy has begun.
        self.data = memoryview(b"")
        passing = zip(flat.passing, plan.layout.passing, strict=True)
        self.small = target.copy_small([*plan.small, *passing], plan.layout)
        tensors, offsets = [one for one, _ in plan.large], [at for _, at in plan.large]
        watched = tensors if flat.watched is None else flat.watched
        self.copy = BackgroundCopy(tensors, offsets, self._begin, watched=watched)
        #: Whether the training has to wait for it.
        self.is_large = bool(tensors)

    def _begin(self) -> int:
        self.data = self.memory.begin(self.version)
        return address_of(self.data)


class Writer:
    """Writes the pieces of one worker, in one generation. Used by the training thread."""

    def __init__(
        self,
        agent: SnapshotRequests,
        place: WriterPlace,
        before_seal: Callable[[float], bool] | None = None,
        *,
        memory_timeout: float = FIRST_MEMORY_TIMEOUT,
    ) -> None:
        """`memory_timeout`: how long the first commit waits for memory, in seconds."""
        self._agent, self._place, self._before_seal = agent, place, before_seal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torchelastic-keep")
        self._own = _PieceMemory(own(place.rank), agent, place, self._pool, memory_timeout)
        self._shared = _PieceMemory(SHARED, agent, place, self._pool, memory_timeout)
        self._shards = _PieceMemory(shard(place.rank), agent, place, self._pool, memory_timeout)
        #: Snapshots in progress: those not copied yet, and those not sealed yet.
        self._copying: list[_Job] = []
        self._sealing: list[tuple[_Job, Future[None]]] = []
        #: The version of the own piece that was sealed and that the agent was not told of.
        self._untold: Version | None = None
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
        self, version: Version, flat: Flat | None, private: bytes | None, shards: Flat | None = None
    ) -> None:
        """Begin a snapshot; `flat` is None on a rank that does not write shared state, `private`
        if it is in the shards."""
        self.finish()
        if private is not None:
            self._publish_own(version, private)
        # Before the shared piece: the pool has one thread, which seals in this order. So whoever
        # finds a sealed shared piece also finds the shards of the worker that wrote it.
        if shards is not None:
            self._latest = version, time.monotonic()
            self._publish(self._shards, version, shards)
        if flat is not None:
            self._publish(self._shared, version, flat)
        if not self._sealing:
            self._tell_own()
        if self._at_once:
            self._wait_for_copies()

    # --- shards ----------------------------------------------------------------------------------

    def shard_status(self) -> ShardStatus:
        """Return the status of this rank's shards of the last version begun."""
        if self._shards.is_refused or self._shared.is_refused:
            return ShardStatus.NEVER
        if self._latest is None:
            return ShardStatus.DONE
        if not all(sealing.done() for _, sealing in self._sealing):
            return ShardStatus.PENDING
        self.finish()
        (version, began), targets = self._latest, [self._shards]
        if self._place.first:
            targets.append(self._shared)
        if not all(target.holds(version) for target in targets):
            return ShardStatus.FAILED
        if self._shards.is_replicated(version) or time.monotonic() > began + REPLICA_TIMEOUT:
            self._tell_late(not self._shards.is_replicated(version))
            return ShardStatus.DONE
        self._agent.tell(Sealed(self._shards.piece, version))  # in case it was not heard
        return ShardStatus.PENDING

    def may_begin(self, least: ShardStatus) -> bool:
        """Return whether all ranks begin a version of shards, given the lowest status."""
        if least == ShardStatus.NEVER and not self._shards.is_refused:
            self._shards.refuse()
            log.warning(
                "Some ranks have no memory for their shards: training continues without snapshots."
            )
        if least == ShardStatus.FAILED and self._latest is not None:
            self._shards.drop(self._latest[0])
            self._shared.drop(self._latest[0])
        return least in (ShardStatus.FAILED, ShardStatus.DONE)

    def holds_shards(self, version: Version) -> bool:
        return self._shards.holds(version)

    def _tell_late(self, late: bool) -> None:
        if late and not self._late:
            log.warning(
                "No other node has copied this rank's shards for %d seconds. If this node is lost, "
                "training since the last copy is lost too.",
                REPLICA_TIMEOUT,
            )
        self._late = late

    # --- around a snapshot -----------------------------------------------------------------------

    def check(self, held: SealedVersion) -> None:
        """Verify a snapshot's checksum in the thread."""
        self._checked = self._pool.submit(held.is_whole)

    def is_whole(self, held: SealedVersion) -> bool:
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
            job.copy.run()
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

    def close(self, *, wait: bool = True) -> None:
        """Stop reading the state, seal the last snapshot and release the memory. Without `wait`
        only the first is done on return, and the thread does the rest: both take long if the state
        is large. `finish` waits for the seal."""
        self._wait_for_copies()
        self._pool.submit(self._release)
        self._pool.shutdown(wait=wait)

    def _release(self) -> None:
        """Run after everything else in the thread."""
        self.finish()
        for target in (self._own, self._shared, self._shards):
            target.close()

    def _publish_own(self, version: Version, private: bytes) -> None:
        memory = self._own.memory(len(private), len(OWN_SKELETON))
        if memory is not None:
            memory.begin(version)[: len(private)] = private
            summed = checksum(private)
            self._seal(memory, version, OWN_SKELETON, len(private), summed)
            self._untold = version

    def _publish(self, target: _PieceMemory, version: Version, flat: Flat) -> None:
        plan = target.plan(flat)
        memory = target.memory(plan.layout.size, len(flat.skeleton))
        if memory is not None:
            job = _Job(target, memory, version, flat, plan)
            if job.is_large:
                self._copying.append(job)
            self._sealing.append((job, self._pool.submit(self._write, job)))

    # --- the thread ------------------------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        job.copy.run()
        self._tell_own()
        if job.copy.error is not None:
            raise job.copy.error
        if job.copy.is_disturbed:
            self._copy_at_once_from_now_on(job.version)
            return
        if faults.planned:
            faults.at("snapshot.copy", step=job.version[1])
        copy_out(job.small, address_of(job.data) + job.layout.small_at)
        used = job.layout.size
        summed = checksum(job.data[:used])
        self._wait_for_ledger()
        self._seal(job.memory, job.version, job.skeleton, used, summed)
        self._agent.tell(Sealed(job.target.piece, job.version))
        job.target.warm(job.memory)

    def _tell_own(self) -> None:
        """Tell the agent of the own piece: after the copy, since the agent then needs a core, and
        training may be waiting for the copy."""
        version, self._untold = self._untold, None
        if version is not None:
            self._agent.tell(Sealed(self._own.piece, version))

    def _wait_for_ledger(self) -> None:
        if self._before_seal is not None and not self._before_seal(LEDGER_TIMEOUT):
            self._before_seal = None
            log.warning(
                "The ledger's disk is hung: snapshots no longer wait for it, and the ledger may "
                "miss its last lines after a failure."
            )

    def _seal(
        self, memory: Memory, version: Version, skeleton: bytes, used: int, summed: int
    ) -> None:
        rank, size = self._place.rank, self._place.size
        memory.seal(version, skeleton, used, summed, rank=rank, size=size)

    def _copy_at_once_from_now_on(self, version: Version) -> None:
        self._at_once = True
        log.warning(
            "Parameters or optimizer state changed between commit() and optimizer.step: the "
            "snapshot of step %d is void, and from now on commit() waits until the copy is done. "
            "To avoid the wait, change them before commit().",
            version[1],
        )


def _rounded_up(size: int) -> int:
    """Round up: numbers in a skeleton grow, and the memory must still fit after a restart."""
    return (size // _ROUND_UP_TO + 2) * _ROUND_UP_TO


class _PieceMemory:
    """The memory for one piece: requested when needed; only the first commit waits for it."""

    def __init__(
        self,
        piece: str,
        agent: SnapshotRequests,
        place: WriterPlace,
        pool: ThreadPoolExecutor,
        timeout: float,
    ) -> None:
        self.piece, self._agent, self._place, self._pool = piece, agent, place, pool
        self._timeout = timeout
        #: Copies of small tensors, arranged as in a buffer.
        self._small, self._copies = torch.empty(0, dtype=torch.uint8), SmallCopies()
        self._plan: _Plan | None = None
        self._memory: Memory | None = None
        self._asked: Future[Memory] | None = None
        #: Whether the last request timed out.
        self._is_late = False
        self.is_refused = False
        #: The memory whose other buffer needs no warming any more.
        self._warmed: Memory | None = None

    def plan(self, flat: Flat) -> _Plan:
        """Return the plan of the last snapshot if it is of the same tensors, else a new one."""
        passing = [one.nbytes for one in flat.passing]
        if self._plan is None or not self._plan.is_of(flat.lasting, passing):
            self._plan = _Plan(flat.lasting, passing)
        return self._plan

    def memory(self, size: int, skeleton: int) -> Memory | None:
        """Return memory of this size, or None if there is none (yet)."""
        if self.is_refused or self._fits(size, skeleton):
            return self._memory
        if self._asked is None:
            wanted = _rounded_up(size), _rounded_up(skeleton)
            self._asked = self._pool.submit(self._agent.request_memory, self.piece, *wanted)
            if not self._is_late:
                wait([self._asked], self._timeout)
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        self._take(asked)
        return self._memory if self._fits(size, skeleton) else None

    def copy_small(
        self, tensors: Sequence[tuple[torch.Tensor, int]], layout: Layout
    ) -> torch.Tensor:
        """Copy tensors to memory that is reused: the end of a buffer with this layout."""
        size = layout.size - layout.small_at
        if len(self._small) != size:
            self._small = torch.zeros(size, dtype=torch.uint8)
        offsets = [at - layout.small_at for _, at in tensors]
        self._copies.copy([one for one, _ in tensors], offsets, self._small)
        return self._small

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
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

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
        self._memory.drop_void(self._place.base, self._place.generation)
