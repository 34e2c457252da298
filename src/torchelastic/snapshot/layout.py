"""The layout of snapshots in shared memory: written by a worker, held by its agent.

A memory is a memfd of a fixed size:

    header        one page: the sizes, and a record for each buffer
    skeletons     one area for each buffer: JSON that describes its content
    buffers       raw bytes

A buffer's record begins with one byte that marks the buffer as whole. `begin` clears that byte of
the oldest buffer, and `seal` sets it when everything else is written. If the writer is killed at
any instruction, the other buffers are unchanged, and its current one is recognisably torn: a
one-byte store cannot be half done. The rest of a record and the skeleton have a checksum, so that a
reader rejects them while they are being written; the writer passes the checksum of the buffer's
bytes to `seal`.

There is one writer at a time. In a memory with b buffers, a sealed version can be read until the
b-th version after it is begun, which overwrites it. A reader may `pin` a version, which is then
overwritten last. The agent notes in the header which version has its replicas.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchelastic import faults
from torchelastic.system import shared_memory
from torchelastic.system.shared_memory import PAGE, Field, map_memory, paged

#: (generation, step); the freshest is the largest.
Version = tuple[int, int]

#: The piece that every node has: state that is the same on all workers.
SHARED = "shared"
_OWN = "own:"
_SHARD = "shard:"

_MAGIC = b"TESNAP01"
#: magic, buffers, bytes of a buffer, bytes of a skeleton.
_SIZES = Field("=8sqqq")
#: generation, step of the freshest version that has its replicas, and their checksum.
_REPLICATED = Field("=qqI", _SIZES.end)
#: The bytes before a record: the first marks the buffer as whole, this one as in use.
_PINNED = 1
#: number, generation, step, rank, size, bytes, bytes of the skeleton, checksum of the buffer.
_RECORD = Field("=qqqqqqqQ", 8)
#: The checksum of the record and the skeleton.
_SUM = Field("=I", _RECORD.end)
_FIRST_RECORD = 64
_RECORD_ROOM = 128
_HEADER = PAGE

#: `MADV_POPULATE_WRITE`, which Python's mmap does not name, and the bytes per call.
_POPULATE_WRITE = 23
_WARM_AT_ONCE = 4 << 20
#: Bytes of pages to allocate at a time.
_ALLOCATE_AT_ONCE = 64 << 20

_TORN, _SEALED = b"\0", b"\1"
_FREE, _IN_USE = b"\0", b"\1"
MOST_BUFFERS = (_HEADER - _FIRST_RECORD) // _RECORD_ROOM


def own(rank: int) -> str:
    """Return the piece that holds the private state of this rank.

    >>> own(3)
    'own:3'
    """
    return f"{_OWN}{rank}"


def shard(rank: int) -> str:
    """Return the piece that holds this rank's parts of sharded tensors.

    >>> shard(3)
    'shard:3'
    """
    return f"{_SHARD}{rank}"


def is_shard(piece: str) -> bool:
    return piece.startswith(_SHARD)


def rank_of(piece: str) -> int | None:
    """Return the rank that writes a piece; None for the shared one, `ValueError` if invalid.

    >>> rank_of("own:3"), rank_of("shard:4"), rank_of("shared")
    (3, 4, None)
    """
    if piece == SHARED:
        return None
    digits = piece.removeprefix(_SHARD if is_shard(piece) else _OWN)
    if piece == digits or not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        raise ValueError(
            f"'{piece[:40]}' is not a piece: write '{SHARED}', '{_OWN}RANK' or '{_SHARD}RANK'."
        )
    return int(digits)


def buffers_for(piece: str, *, replicated: bool = False) -> int:
    """Return how many versions of a piece to hold; `replicated`: copies are sent from it.

    Shared state is the same everywhere: any node with the freshest version can send it to all, and
    while that is written the one before is still there. So two buffers are enough.

    Own pieces must all be of one version, and workers write at different speeds, but at most one
    version apart, because all workers take part in each step. While one writes version n + 1,
    another may still write n. With three buffers the first also holds n and n - 1, and the second
    n - 1 and n - 2: both hold n - 1. If copies are sent, a fourth buffer holds the version being
    sent, so that no worker overwrites it. The copies have three, too: a worker that writes no
    shared state may have given n + 1 while those that do have sealed only n - 1.

    A new version of shards is begun only when the last one is complete, including its copies
    (`writer`), so two buffers are enough.
    """
    if piece == SHARED or is_shard(piece):
        return 2
    return 4 if replicated else 3


@dataclass(frozen=True)
class Sizes:
    """The capacity of a memory."""

    #: In a buffer.
    bytes: int
    #: In a skeleton.
    skeleton: int
    buffers: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.buffers <= MOST_BUFFERS or self.bytes < 0 or self.skeleton < 0:
            raise ValueError(f"Invalid sizes of a snapshot memory: {self}.")

    @property
    def total(self) -> int:
        """Bytes of the whole memory."""
        return _HEADER + self.buffers * (paged(self.skeleton) + paged(self.bytes))

    def skeleton_at(self, index: int) -> int:
        return _HEADER + index * paged(self.skeleton)

    def buffer_at(self, index: int) -> int:
        begin = _HEADER + self.buffers * paged(self.skeleton)
        return begin + index * paged(self.bytes)


@dataclass(frozen=True)
class SealedVersion:
    """A sealed version, as one process sees it."""

    version: Version
    #: Of the worker that wrote it, and of its world.
    rank: int
    size: int
    skeleton: bytes
    #: A view of the bytes, not a copy: another version's once this one is overwritten.
    data: memoryview
    checksum: int
    #: The buffer's index, and how many versions were begun before.
    index: int
    number: int

    def is_whole(self) -> bool:
        """Return whether the bytes match the checksum they were sealed with."""
        return checksum(self.data) == self.checksum


def checksum(data: memoryview | bytes, before: int = 0) -> int:
    """Return the checksum of bytes that follow those with checksum `before`. Frees the GIL."""
    return zlib.crc32(data, before)


def create(
    sizes: Sizes, *, take: bool = True, taken: Callable[[int], None] = lambda size: None
) -> int:
    """Create a memory; return its descriptor, which the caller owns. Its pages are allocated now,
    or later by `take_pages`. Its size is sealed.
    """
    descriptor = shared_memory.create("snapshot", sizes.total, sealable=True)
    try:
        if take:
            take_pages(descriptor, sizes, taken)
        shared_memory.seal_size(descriptor)
        head = _SIZES.pack(_MAGIC, sizes.buffers, sizes.bytes, sizes.skeleton)
        os.pwrite(descriptor, head, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def take_pages(
    descriptor: int, sizes: Sizes, taken: Callable[[int], None] = lambda size: None
) -> None:
    """Allocate all pages of a memory now, when that can still fail cleanly; later the kernel would
    kill the writer. Calls `taken` with the progress."""
    for begin in range(0, sizes.total, _ALLOCATE_AT_ONCE):
        length = min(_ALLOCATE_AT_ONCE, sizes.total - begin)
        os.posix_fallocate(descriptor, begin, length)
        taken(length)


def sizes_of(descriptor: int) -> Sizes:
    """Return the capacity of a memory; `ValueError` if it does not hold snapshots."""
    head = _SIZES.read(descriptor)
    if head is None or head[0] != _MAGIC:
        raise ValueError("This memory does not hold snapshots.")
    _, buffers, room, skeleton = head
    sizes = Sizes(room, skeleton, buffers)
    if os.fstat(descriptor).st_size != sizes.total:
        raise ValueError("The size of a snapshot memory differs from the size in its header.")
    return sizes


class Memory:
    """One process's view of a memory. The caller owns the descriptor and may close it."""

    def __init__(self, descriptor: int, *, writable: bool = True) -> None:
        self.sizes = sizes_of(descriptor)
        self._map = map_memory(descriptor, writable=writable)
        self._view = memoryview(self._map)
        #: The buffer that is being written, and its number.
        self._begun: tuple[int, int] | None = None

    def close(self) -> None:
        """Release the mapping. Views still in use (`begin`, `SealedVersion.data`) stay valid: the
        mapping ends with the last one."""
        self._view.release()
        with contextlib.suppress(BufferError):  # views are out
            self._map.close()

    def warm(self) -> None:
        """Map all pages into this process now, so that the first write to each does not wait.

        Works in small portions, since other Python threads wait meanwhile.
        """
        for start in range(0, self.sizes.total, _WARM_AT_ONCE):
            length = min(_WARM_AT_ONCE, self.sizes.total - start)
            try:
                self._map.madvise(_POPULATE_WRITE, start, length)
            except OSError:  # Linux before 5.14 does not know it, and writes wait
                return

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, version: Version) -> memoryview:
        """Begin a version; return the oldest buffer to write to, which is torn from now on.

        `ValueError` if the memory holds one as fresh: readers would take that for the freshest.
        """
        held = self.holdings()
        if held and version <= held[0].version:
            raise ValueError(
                f"A snapshot of {_words(version)} cannot follow one of {_words(held[0].version)}: "
                "commit each step once, in order."
            )
        index = self._next(held)
        number = 1 + max((item.number for item in held), default=0)
        self._store(self._record_at(index), _TORN)
        self._begun = (index, number)
        faults.at("snapshot.begun", step=version[1])
        return self._buffer(index)

    @property
    def begun_at(self) -> int:
        """The offset of the begun buffer in the memory, for writing to its descriptor."""
        if self._begun is None:
            raise ValueError("No snapshot was begun.")
        return self.sizes.buffer_at(self._begun[0])

    def _next(self, held: list[SealedVersion]) -> int:
        """Return the buffer to write next, given what is held, the freshest first."""
        taken = {item.index for item in held}
        free = [index for index in range(self.sizes.buffers) if index not in taken]
        if free:
            return free[0]
        older = [item.index for item in reversed(held[1:])]
        # All in use: better that a reader restarts its copy than that training waits.
        return next((index for index in older if not self._is_pinned(index)), older[0])

    def seal(
        self,
        version: Version,
        skeleton: bytes,
        used: int,
        checksum: int,
        *,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Seal the first `used` bytes of the begun buffer as this version.

        `checksum` is the result of the function of that name; rank and size are the writer's.
        """
        if self._begun is None:
            raise ValueError("No snapshot was begun, so none can be sealed.")
        if used > self.sizes.bytes or len(skeleton) > self.sizes.skeleton:
            raise ValueError(
                f"A snapshot of {used} bytes with a skeleton of {len(skeleton)} does not fit into "
                f"memory for {self.sizes.bytes} and {self.sizes.skeleton}: request more memory."
            )
        index, number = self._begun
        record = _RECORD.pack(number, *version, rank, size, used, len(skeleton), checksum)
        at = self._record_at(index)
        self._store(self.sizes.skeleton_at(index), skeleton)
        faults.at("snapshot.skeleton", step=version[1])
        self._store(at + _RECORD.at, record + _SUM.pack(zlib.crc32(skeleton, zlib.crc32(record))))
        faults.at("snapshot.sealing", step=version[1])
        self._store(at, _SEALED)
        self._begun = None

    def _store(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def drop(self, version: Version) -> None:
        """Forget a version, if it is held."""
        for held in self.holdings():
            if held.version == version:
                self._store(self._record_at(held.index), _TORN)

    def drop_void(self, base: Version, generation: int) -> None:
        """Drop void versions: those of earlier generations beyond this generation's base.

        Call before the first `begin` of a generation, which would otherwise overwrite the base,
        since it is older than the void versions.
        """
        for held in self.holdings():
            if is_void(held.version, base, generation):
                self.drop(held.version)

    # --- what readers note -----------------------------------------------------------------------

    def pin(self, held: SealedVersion) -> None:
        """Mark this version as being read: it is overwritten last. Pins are not counted."""
        self._store(self._record_at(held.index) + _PINNED, _IN_USE)

    def unpin(self, held: SealedVersion) -> None:
        self._store(self._record_at(held.index) + _PINNED, _FREE)

    def _is_pinned(self, index: int) -> bool:
        at = self._record_at(index) + _PINNED
        return bytes(self._view[at : at + 1]) == _IN_USE

    def note_replicated(self, version: Version) -> None:
        """Agent only: note that all replicas of this version are in place."""
        summed = zlib.crc32(repr(version).encode())
        self._store(_REPLICATED.at, _REPLICATED.pack(*version, summed))

    def replicated(self) -> Version | None:
        """Return the freshest version known to have its replicas, or None."""
        generation, step, summed = _REPLICATED.of(self._view)
        version = (int(generation), int(step))
        return version if zlib.crc32(repr(version).encode()) == summed else None

    # --- reading ---------------------------------------------------------------------------------

    def holdings(self) -> list[SealedVersion]:
        """Return all sealed versions, the freshest first."""
        return sorted(self._sealed(), key=lambda held: (held.version, held.number), reverse=True)

    def freshest(self) -> SealedVersion | None:
        """Return the freshest sealed version, without checking its bytes."""
        return next(iter(self.holdings()), None)

    def find(self, version: Version) -> SealedVersion | None:
        return next((held for held in self.holdings() if held.version == version), None)

    def still_holds(self, held: SealedVersion) -> bool:
        """Return whether no write to it has begun since it was found."""
        now = self._read(held.index)
        # A number is used again once a version was dropped.
        return now is not None and (now.number, now.version) == (held.number, held.version)

    def _sealed(self) -> Iterator[SealedVersion]:
        for index in range(self.sizes.buffers):
            held = self._read(index)
            if held is not None:
                yield held

    def _read(self, index: int) -> SealedVersion | None:
        """Return a buffer's version; None if it is torn or its record is invalid."""
        at = self._record_at(index)
        if self._view[at : at + 1] != _SEALED:
            return None
        record = bytes(self._view[at + _RECORD.at : at + _RECORD.end])
        number, generation, step, rank, size, used, length, summed = _RECORD.unpack(record)
        if not (0 <= used <= self.sizes.bytes and 0 <= length <= self.sizes.skeleton):
            return None
        begin = self.sizes.skeleton_at(index)
        skeleton = bytes(self._view[begin : begin + length])
        (expected,) = _SUM.of(self._view, at)
        if zlib.crc32(skeleton, zlib.crc32(record)) != expected:
            return None
        data = self._buffer(index)[:used].toreadonly()
        return SealedVersion((generation, step), rank, size, skeleton, data, summed, index, number)

    def _record_at(self, index: int) -> int:
        return _FIRST_RECORD + index * _RECORD_ROOM

    def _buffer(self, index: int) -> memoryview:
        begin = self.sizes.buffer_at(index)
        return self._view[begin : begin + self.sizes.bytes]


def _words(version: Version) -> str:
    return f"generation {version[0]}, step {version[1]}"


def is_void(version: Version, base: Version, generation: int) -> bool:
    """Return whether a version is void in a generation that began with this base.

    >>> is_void((0, 11), (0, 10), 1), is_void((0, 10), (0, 10), 1), is_void((1, 11), (0, 10), 1)
    (True, False, False)
    """
    return version > base and version[0] < generation
