"""How snapshots lie in a memory that several processes map: written by a worker, kept by its agent.

A memory is a memfd of a fixed size:

    header        one page: what the sizes are, and a record for each buffer
    skeletons     one area for each buffer: JSON that says what lies where in it
    buffers       raw bytes

A buffer's record begins with one byte that says whether the buffer is whole. `begin` takes that
byte away from the oldest buffer, and `seal` gives it back when everything else is written: a
writer that is killed at any instruction leaves the other buffers as they were, and the one it was
at recognisably torn. A store of one byte cannot be half done. The rest of a record, and the
skeleton, have a checksum of their own, so that a reader that looks while it is written does not
believe it; the bytes of the buffer have the checksum that the writer gives to `seal`.

There is one writer at a time. A version that was sealed is found again until as many others have
been begun as there are buffers. Whoever reads may `pin` one, which is then overwritten last, and
the agent notes in the header what has its replicas.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchelastic import faults

#: (generation, step); the freshest is the largest.
Version = tuple[int, int]

#: The piece that every node has one of: state that is the same on all workers.
SHARED = "shared"
_OWN = "own:"
_SHARD = "shard:"

_MAGIC = b"TESNAP01"
#: magic, buffers, bytes of a buffer, bytes of a skeleton.
_SIZES = struct.Struct("=8sqqq")
#: number, generation, step, rank, size, bytes, bytes of the skeleton, checksum of the buffer.
_RECORD = struct.Struct("=qqqqqqqQ")
#: The checksum of the record and the skeleton.
_SUM = struct.Struct("=I")
#: generation, step of the freshest version that has its replicas, and their checksum.
_REPLICATED = struct.Struct("=qqI")
_REPLICATED_AT = _SIZES.size
#: What comes before a record: the byte that says whether the buffer is whole, and one that says
#: whether it is in use.
_WHOLE, _PINNED = 8, 1
_FIRST_RECORD = 64
_RECORD_ROOM = 128
_HEADER = mmap.PAGESIZE

#: `MADV_POPULATE_WRITE`, which Python's mmap has no name for, and how much of it at a time.
_POPULATE_WRITE = 23
_WARMED = 4 << 20
#: Pages are taken so many bytes at a time.
_TAKEN = 64 << 20

_TORN, _SEALED = b"\0", b"\1"
_FREE, _IN_USE = b"\0", b"\1"
MOST_BUFFERS = (_HEADER - _FIRST_RECORD) // _RECORD_ROOM


def own(rank: int) -> str:
    """The piece that holds what only the worker of this rank has.

    >>> own(3)
    'own:3'
    """
    return f"{_OWN}{rank}"


def shard(rank: int) -> str:
    """The piece that holds this rank's parts of tensors that are sharded over ranks.

    >>> shard(3)
    'shard:3'
    """
    return f"{_SHARD}{rank}"


def is_shard(piece: str) -> bool:
    return piece.startswith(_SHARD)


def rank_of(piece: str) -> int | None:
    """The rank that writes it; None for the shared one, `ValueError` for no piece at all.

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
    """How many versions a piece needs room for; `replicated`: copies are sent from it.

    Shared state is the same everywhere: whoever has the freshest can give it to all, and while it
    is written the one before is there. Of own pieces all must be of one version, and workers write
    at different speeds. One may write version n + 1 while another still writes n, though never
    n - 1: a step joins them all. With three buffers both then have n - 1. One more is for a copy
    on its way, which no worker writes to then. Of shards a new version is begun only when the last
    one is complete, copies and all (`training.keeping_writer`), so that two will do.
    """
    if piece == SHARED or is_shard(piece):
        return 2
    return 4 if replicated else 3


@dataclass(frozen=True)
class Sizes:
    """What a memory has room for."""

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
        return _HEADER + self.buffers * (_paged(self.skeleton) + _paged(self.bytes))

    def skeleton_at(self, index: int) -> int:
        return _HEADER + index * _paged(self.skeleton)

    def buffer_at(self, index: int) -> int:
        begin = _HEADER + self.buffers * _paged(self.skeleton)
        return begin + index * _paged(self.bytes)


def _paged(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class Held:
    """A sealed version, as one process sees it."""

    version: Version
    #: Of the worker that wrote it, and of its world.
    rank: int
    size: int
    skeleton: bytes
    #: The bytes, where they lie: not a copy, and another version's once this one is overwritten.
    data: memoryview
    checksum: int
    #: Which buffer, and how many have been begun before.
    index: int
    number: int

    def is_whole(self) -> bool:
        """Whether the bytes have the checksum that they were sealed with."""
        return checksum(self.data) == self.checksum


def checksum(data: memoryview | bytes, before: int = 0) -> int:
    """Of bytes that follow those with the checksum `before`. Lets other threads run."""
    return zlib.crc32(data, before)


def create(
    sizes: Sizes, *, take: bool = True, taken: Callable[[int], None] = lambda size: None
) -> int:
    """A new memory, its pages taken at once unless told otherwise (`take_pages` does it later, or
    here); the descriptor is the caller's.

    Not in /dev/shm, which is 64 MB in an ordinary pod. Nobody can change its size any more: a
    shorter one would kill whoever reads it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("torchelastic-snapshot", flags)
    try:
        os.ftruncate(descriptor, sizes.total)
        if take:
            take_pages(descriptor, sizes, taken)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        head = _SIZES.pack(_MAGIC, sizes.buffers, sizes.bytes, sizes.skeleton)
        os.pwrite(descriptor, head, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def take_pages(
    descriptor: int, sizes: Sizes, taken: Callable[[int], None] = lambda size: None
) -> None:
    """Have all pages of a memory now, when it can still be refused, rather than as it is written:
    then the kernel would kill whoever writes. `taken` is told of every few of them."""
    for begin in range(0, sizes.total, _TAKEN):
        length = min(_TAKEN, sizes.total - begin)
        os.posix_fallocate(descriptor, begin, length)
        taken(length)


def sizes_of(descriptor: int) -> Sizes:
    """What a memory has room for; `ValueError` if it is no memory of ours."""
    head = os.pread(descriptor, _SIZES.size, 0)
    if len(head) != _SIZES.size or not head.startswith(_MAGIC):
        raise ValueError("This memory does not hold snapshots.")
    _, buffers, room, skeleton = _SIZES.unpack(head)
    sizes = Sizes(room, skeleton, buffers)
    if os.fstat(descriptor).st_size != sizes.total:
        raise ValueError("The size of a snapshot memory differs from the size in its header.")
    return sizes


class Memory:
    """One process's view of a memory. The descriptor stays the caller's, who may close it."""

    def __init__(self, descriptor: int, *, writable: bool = True) -> None:
        self.sizes = sizes_of(descriptor)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, self.sizes.total, access=access)
        self._view = memoryview(self._map)
        #: The buffer that is being written, and its number.
        self._begun: tuple[int, int] | None = None

    def close(self) -> None:
        """Let go of it. What is still in use of it (`begin`, `Held.data`) stays valid until then:
        the mapping goes with the last view."""
        self._view.release()
        with contextlib.suppress(BufferError):  # views are out
            self._map.close()

    def warm(self) -> None:
        """Have all pages in this process's tables: the first write to each would wait for that.

        A little at a time, since other threads of the interpreter wait meanwhile.
        """
        for start in range(0, self.sizes.total, _WARMED):
            length = min(_WARMED, self.sizes.total - start)
            try:
                self._map.madvise(_POPULATE_WRITE, start, length)
            except OSError:  # Linux before 5.14 does not know it, and writes wait
                return

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, version: Version) -> memoryview:
        """Where to write the bytes of a version: the oldest buffer, which is torn from now on.

        `ValueError` if one is held that is as fresh: readers would take that for the freshest.
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
        faults.at("snapshot.begun")
        return self._buffer(index)

    @property
    def begun_at(self) -> int:
        """Where the buffer that was begun is in the memory, for who writes to its descriptor."""
        if self._begun is None:
            raise ValueError("No snapshot was begun.")
        return self.sizes.buffer_at(self._begun[0])

    def _next(self, held: list[Held]) -> int:
        """The buffer to write next, if the freshest first is what is held."""
        taken = {item.index for item in held}
        free = [index for index in range(self.sizes.buffers) if index not in taken]
        if free:
            return free[0]
        older = [item.index for item in reversed(held[1:])]
        # All in use: rather has somebody to begin a copy anew than training to wait.
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
        """The first `used` bytes of the buffer that was begun are this version, from now on.

        `checksum` is that of those bytes (the function of that name); rank and size are the
        writer's.
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
        faults.at("snapshot.skeleton")
        self._store(at + _WHOLE, record + _SUM.pack(zlib.crc32(skeleton, zlib.crc32(record))))
        faults.at("snapshot.sealing")
        self._store(at, _SEALED)
        self._begun = None

    def _store(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def drop(self, version: Version) -> None:
        """Forget a version, if it is held."""
        for held in self.holdings():
            if held.version == version:
                self._store(self._record_at(held.index), _TORN)

    def settle(self, base: Version, generation: int) -> None:
        """Forget what is void: what generations before this one did beyond the base it began with.

        To be called before the first `begin` of a generation, which would otherwise overwrite the
        base itself, older than what is void.
        """
        for held in self.holdings():
            if is_void(held.version, base, generation):
                self.drop(held.version)

    # --- what readers note -----------------------------------------------------------------------

    def pin(self, held: Held) -> None:
        """Have this overwritten last: it is being read. `unpin` does not count how often."""
        self._store(self._record_at(held.index) + _PINNED, _IN_USE)

    def unpin(self, held: Held) -> None:
        self._store(self._record_at(held.index) + _PINNED, _FREE)

    def _is_pinned(self, index: int) -> bool:
        at = self._record_at(index) + _PINNED
        return bytes(self._view[at : at + 1]) == _IN_USE

    def note_replicated(self, version: Version) -> None:
        """Of the agent: all replicas of this version are where they should be."""
        summed = zlib.crc32(repr(version).encode())
        self._store(_REPLICATED_AT, _REPLICATED.pack(*version, summed))

    def replicated(self) -> Version | None:
        """The freshest version that is known to have its replicas; None: none has."""
        generation, step, summed = _REPLICATED.unpack_from(self._view, _REPLICATED_AT)
        version = (int(generation), int(step))
        return version if zlib.crc32(repr(version).encode()) == summed else None

    # --- reading ---------------------------------------------------------------------------------

    def holdings(self) -> list[Held]:
        """Everything that is sealed, the freshest first."""
        found = sorted(self._sealed(), key=lambda held: (held.version, held.number), reverse=True)
        return found

    def freshest(self) -> Held | None:
        """The freshest that is sealed; a torn one is passed over. Its bytes are not looked at."""
        return next(iter(self.holdings()), None)

    def find(self, version: Version) -> Held | None:
        return next((held for held in self.holdings() if held.version == version), None)

    def still_holds(self, held: Held) -> bool:
        """Whether it has not been overwritten, nor begun to be, since it was found."""
        now = self._read(held.index)
        # A number is used again once a version was dropped.
        return now is not None and (now.number, now.version) == (held.number, held.version)

    def _sealed(self) -> Iterator[Held]:
        for index in range(self.sizes.buffers):
            held = self._read(index)
            if held is not None:
                yield held

    def _read(self, index: int) -> Held | None:
        """A buffer's version; None if it is torn, or if what its record says cannot be."""
        at = self._record_at(index)
        if self._view[at : at + 1] != _SEALED:
            return None
        record = bytes(self._view[at + _WHOLE : at + _WHOLE + _RECORD.size])
        number, generation, step, rank, size, used, length, summed = _RECORD.unpack(record)
        if not (0 <= used <= self.sizes.bytes and 0 <= length <= self.sizes.skeleton):
            return None
        begin = self.sizes.skeleton_at(index)
        skeleton = bytes(self._view[begin : begin + length])
        (expected,) = _SUM.unpack_from(self._view, at + _WHOLE + _RECORD.size)
        if zlib.crc32(skeleton, zlib.crc32(record)) != expected:
            return None
        data = self._buffer(index)[:used].toreadonly()
        return Held((generation, step), rank, size, skeleton, data, summed, index, number)

    def _record_at(self, index: int) -> int:
        return _FIRST_RECORD + index * _RECORD_ROOM

    def _buffer(self, index: int) -> memoryview:
        begin = self.sizes.buffer_at(index)
        return self._view[begin : begin + self.sizes.bytes]


def _words(version: Version) -> str:
    return f"generation {version[0]}, step {version[1]}"


def is_void(version: Version, base: Version, generation: int) -> bool:
    """Whether a generation that began with this base has left a version behind.

    >>> is_void((0, 11), (0, 10), 1), is_void((0, 10), (0, 10), 1), is_void((1, 11), (0, 10), 1)
    (True, False, False)
    """
    return version > base and version[0] < generation
