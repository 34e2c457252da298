"""A node's snapshot memory: its own pieces, and replicas of other nodes' pieces.

The agent owns the memories. They outlive workers and generations, and are gone when the agent ends.
All methods may be called from any thread: none waits for pages or for transfers.

A void version is no longer listed. Only the next writer of that memory tears it: anyone else might
tear what has just been sealed in its place. A memory that receives a version stays until that is
done: otherwise its descriptor's number could become another file's.

A piece keeps its memory as long as new versions fit. If they do not, or if a later generation has
other pieces, the old memory stays until the new generation has committed often enough
(`COMMITS_UNTIL_SAFE`) that no other node can need it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torchelastic.snapshot import layout
from torchelastic.snapshot.layout import (
    Memory,
    SealedVersion,
    Sizes,
    Version,
    buffers_for,
    create,
    is_void,
    rank_of,
)
from torchelastic.snapshot.messages import InventoryItem
from torchelastic.system import memory_limit

#: Versions that a node commits in a generation before all others have surely committed one: one
#: worker may write the second while another writes the first, but never the third (`buffers_for`).
COMMITS_UNTIL_SAFE = 3
#: If a memory is more than this many times too large, the rest is freed.
MOST_OVERSIZE = 2
#: The limit of replicas: far more than the workers on a few nodes. A faulty node must not make this
#: one hold a file for every name that it invents.
MOST_REPLICAS = 512


@dataclass(eq=False)
class MemoryEntry:
    """One memory of this node: a piece, its versions, and its readers."""

    piece: str
    #: The node whose replica this is; empty for our own piece.
    origin: str
    sizes: Sizes
    descriptor: int
    memory: Memory = field(repr=False)
    #: Whether all its pages are allocated.
    is_taken: bool = True
    #: Held while a version is copied in from another node (`SnapshotMemory.bringing`).
    writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    #: Void versions that are still in it.
    void: set[Version] = field(default_factory=set, repr=False)
    #: The number of readers, by buffer.
    readers: Counter[int] = field(default_factory=Counter, repr=False)

    def holdings(self) -> list[SealedVersion]:
        """Return the versions that are not void, the freshest first."""
        return [held for held in self.memory.holdings() if held.version not in self.void]

    def freshest(self) -> SealedVersion | None:
        return next(iter(self.holdings()), None)

    def find(self, version: Version) -> SealedVersion | None:
        return next((held for held in self.holdings() if held.version == version), None)

    def mark_void(self, base: Version, generation: int) -> None:
        versions = {held.version for held in self.memory.holdings()}
        self.void = {one for one in versions if one in self.void or is_void(one, base, generation)}

    def tear_void(self) -> None:
        """Tear void versions. Only the writer may call this, right before it writes."""
        for version in self.void:
            self.memory.drop(version)
        self.void = set()

    def fits(self, wanted: Sizes) -> bool:
        has = self.sizes
        return (
            wanted.bytes <= has.bytes <= max(MOST_OVERSIZE * wanted.bytes, 1 << 20)
            and wanted.skeleton <= has.skeleton
            and wanted.buffers <= has.buffers
        )

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


@dataclass
class _Left:
    """The bytes of a new memory whose pages are not allocated yet."""

    bytes: int


class SnapshotMemory:
    """The memories of one node."""

    def __init__(self, *, replicated: bool = False) -> None:
        """`replicated`: other nodes get copies, so each piece has one more buffer."""
        self._replicated = replicated
        #: Whether copies go to other nodes: then a generation needs its replicas too.
        self.awaits_replicas = False
        self._lock = threading.Lock()
        self._kept: list[MemoryEntry] = []
        #: Pieces, with their origins, whose memory is being made; notifies waiting threads.
        self._in_making: set[tuple[str, str]] = set()
        self._is_made = threading.Condition(self._lock)
        #: Bytes of pages not allocated yet, of memories being made.
        self._promised = 0
        #: By generation, how often its freshest own piece was sealed here.
        self._sealed: Counter[tuple[int, str]] = Counter()
        #: No replica of a version before this one is needed.
        self._outdated: Version = (-1, -1)
        #: The latest version of each, so that one reported twice counts once.
        self._heard: dict[str, Version] = {}

    # --- room ------------------------------------------------------------------------------------

    def memory_for(self, piece: str, size: int, skeleton: int, *, take: bool = True) -> MemoryEntry:
        """Return the memory for a worker of this node to write a piece to. A new one gets its pages
        now unless the caller postpones that."""
        buffers = buffers_for(piece, replicated=self._replicated)
        return self._place(piece, "", Sizes(size, skeleton, buffers), take=take)

    def memory_for_replica(self, piece: str, origin: str, size: int, skeleton: int) -> MemoryEntry:
        """Return the memory for replicas of a piece; `NoRoom` also if there are too many."""
        with self._lock:
            if not self._of(piece, origin):
                self._make_way()
        return self._place(piece, origin, Sizes(size, skeleton, buffers_for(piece)), take=True)

    def grant(self, piece: str, size: int, skeleton: int) -> int:
        """Do the same for another process: return a descriptor, which the caller closes."""
        while True:
            entry = self.memory_for(piece, size, skeleton)
            with self._lock:
                if entry in self._kept:  # else it was let go of in between
                    return os.dup(entry.descriptor)

    @contextmanager
    def bringing(self, entry: MemoryEntry) -> Iterator[bool]:
        """Yield whether a version may be copied into this memory now; hold it meanwhile."""
        with self._lock:
            may = entry in self._kept and entry.writing.acquire(blocking=False)
            if may:
                entry.tear_void()
        try:
            yield may
        finally:
            if may:
                entry.writing.release()
                self._drop_if_outdated(entry)

    def _place(self, piece: str, origin: str, wanted: Sizes, *, take: bool) -> MemoryEntry:
        rank_of(piece)  # a bad name is refused here
        with self._making(piece, origin):
            with self._lock:
                entry = self._fitting(piece, origin, wanted)
                if entry is None:
                    self._drop([one for one in self._of(piece, origin) if one.freshest() is None])
                    memory_limit.check(
                        wanted.total, f"snapshots of '{piece}'", promised=self._promised
                    )
                    self._promised += wanted.total
            if entry is None:
                return self._make(piece, origin, wanted, take=take)
            if take and not entry.is_taken:
                self._take_pages(entry)
            return entry

    @contextmanager
    def _making(self, piece: str, origin: str) -> Iterator[None]:
        """Make memories one at a time for each piece, without blocking other pieces."""
        with self._lock:
            while (piece, origin) in self._in_making:
                self._is_made.wait()
            self._in_making.add((piece, origin))
        try:
            yield
        finally:
            with self._lock:
                self._in_making.remove((piece, origin))
                self._is_made.notify_all()

    def _fitting(self, piece: str, origin: str, wanted: Sizes) -> MemoryEntry | None:
        for entry in self._of(piece, origin):
            if entry.fits(wanted):
                # The last one is written to; those before it wait to be dropped.
                self._kept.remove(entry)
                self._kept.append(entry)
                return entry
        return None

    def _make(self, piece: str, origin: str, sizes: Sizes, *, take: bool) -> MemoryEntry:
        left = _Left(sizes.total)
        try:
            descriptor = create(sizes, take=take, taken=lambda size: self._taken(left, size))
        finally:
            self._taken(left, left.bytes)
        made = MemoryEntry(piece, origin, sizes, descriptor, Memory(descriptor), take)
        with self._lock:
            self._kept.append(made)
        return made

    def _taken(self, left: _Left, size: int) -> None:
        with self._lock:
            self._promised -= size
            left.bytes -= size

    def _take_pages(self, entry: MemoryEntry) -> None:
        with self._lock:
            if entry not in self._kept:
                return
            descriptor = os.dup(entry.descriptor)
        try:
            layout.take_pages(descriptor, entry.sizes)
            entry.is_taken = True
        finally:
            os.close(descriptor)

    def _make_way(self) -> None:
        """If there are too many replicas, drop the empty ones: each is a file, too."""
        replicas = [entry for entry in self._kept if entry.origin]
        if len(replicas) < MOST_REPLICAS:
            return
        self._drop([entry for entry in replicas if entry.freshest() is None])
        if sum(bool(entry.origin) for entry in self._kept) >= MOST_REPLICAS:
            raise memory_limit.NoRoom(
                f"This node already holds {MOST_REPLICAS} copies of other nodes' snapshots, the "
                "limit: run fewer workers per node, or fewer replicas."
            )

    def _of(self, piece: str, origin: str) -> list[MemoryEntry]:
        return [entry for entry in self._kept if (entry.piece, entry.origin) == (piece, origin)]

    # --- looking ---------------------------------------------------------------------------------

    def holdings(self) -> tuple[InventoryItem, ...]:
        """Return all versions of all pieces in the memories now."""
        with self._lock:
            return tuple(
                InventoryItem(
                    entry.piece,
                    held.version,
                    len(held.data),
                    held.rank,
                    held.size,
                    replica=bool(entry.origin),
                )
                for entry in self._kept
                for held in entry.holdings()
            )

    def open(self, piece: str, version: Version) -> int | None:
        """Return a descriptor (the caller closes it) of a memory that holds this, or None."""
        with self._lock:
            found = self._find(piece, version)
            return os.dup(found[0].descriptor) if found is not None else None

    @contextmanager
    def reading(
        self, piece: str, version: Version | None
    ) -> Iterator[tuple[Memory, int, SealedVersion]]:
        """Yield a version to read, pinned and held meanwhile; `KeyError` if it is not held. None
        means the freshest that workers of this node have written."""
        with self._lock:
            found = self._find(piece, version)
            if found is None:
                raise KeyError(piece)
            entry, held = found
            descriptor = os.dup(entry.descriptor)
            entry.readers[held.index] += 1
            entry.memory.pin(held)
        memory = Memory(descriptor)
        try:
            found_there = memory.find(held.version)
            if found_there is None:  # overwritten just now
                raise KeyError(piece)
            yield memory, descriptor, found_there
        finally:
            self._end_reading(entry, memory, held)
            memory.close()
            os.close(descriptor)

    def _end_reading(self, entry: MemoryEntry, memory: Memory, held: SealedVersion) -> None:
        with self._lock:
            entry.readers[held.index] -= 1
            if not entry.readers[held.index]:
                memory.unpin(held)

    def _find(
        self, piece: str, version: Version | None
    ) -> tuple[MemoryEntry, SealedVersion] | None:
        """Find a version, own memories before replicas; the freshest if none is given."""
        found = [
            (entry, held)
            for entry in self._kept
            for held in entry.holdings()
            if entry.piece == piece and version in (None, held.version)
            if version is not None or not entry.origin
        ]
        order = sorted(found, key=lambda pair: (bool(pair[0].origin), -pair[1].number))
        if version is None:
            order = sorted(found, key=lambda pair: pair[1].version, reverse=True)
        return order[0] if order else None

    def fresher_than(self, known: Mapping[str, Version]) -> list[str]:
        """Return this node's own pieces with a version fresher than the given ones, without the
        shared one, which every node writes for itself."""
        with self._lock:
            pieces = dict.fromkeys(entry.piece for entry in self._kept if not entry.origin)
            return [
                piece
                for piece in pieces
                if rank_of(piece) is not None
                and (found := self._find(piece, None)) is not None
                and (piece not in known or known[piece] < found[1].version)
            ]

    # --- letting go ------------------------------------------------------------------------------

    def sealed(self, written: Sequence[tuple[str, Version]]) -> None:
        """Note that workers of this node have written these versions of these pieces."""
        with self._lock:
            generations = {version[0] for _, version in written}
            for piece, version in written:
                if self._heard.get(piece) != version:
                    self._sealed[version[0], piece] += 1
                    self._heard[piece] = version
            if not self.awaits_replicas:
                self._note_replicated(written)
            for generation in generations:
                self._let_go(generation)

    def note_replicated(self, piece: str, version: Version) -> None:
        """Note that this version has all its replicas."""
        with self._lock:
            self._note_replicated([(piece, version)])
            self._let_go(version[0])

    def _note_replicated(self, pieces: Sequence[tuple[str, Version]]) -> None:
        for piece, version in pieces:
            for entry in self._of(piece, ""):
                entry.memory.note_replicated(version)

    def _let_go(self, generation: int) -> None:
        """Drop memories of older generations that this one no longer needs.

        If a generation gets no replicas because no node has memory for them, hold the one before
        instead, but no more: memory must not grow with the number of generations.

        Once per generation: this reads all memories, and is called for every piece of every step.
        """
        done = self._outdated >= (generation, -1)
        counts = (count for (number, _), count in self._sealed.items() if number == generation)
        if done or max(counts, default=0) < COMMITS_UNTIL_SAFE:
            return
        noted = [entry.memory.replicated() for entry in self._kept if not entry.origin]
        safe = not self.awaits_replicas or any(item and item[0] >= generation for item in noted)
        needed = generation if safe else generation - 1
        freshest = ((entry, entry.memory.freshest()) for entry in self._kept)
        self._drop([entry for entry, held in freshest if held and held.version[0] < needed])
        self._outdated = max(self._outdated, (needed, -1))
        for key in [key for key in self._sealed if key[0] < generation]:
            del self._sealed[key]

    def drop_void(self, base: Version, generation: int, *, outside: bool = False) -> None:
        """Drop the versions that are void (`layout.is_void`).

        A node `outside` that generation's world, where no worker writes, also frees everything
        older than the base: no node will ask for it.
        """
        with self._lock:
            for entry in self._kept:
                entry.mark_void(base, generation)
            if outside:
                self._drop(self._older_than(base))

    def drop_before(self, version: Version) -> None:
        """Free all memories with nothing as fresh as this, and replicas that arrive later."""
        with self._lock:
            self._outdated = max(self._outdated, version)
            self._drop(self._older_than(version))

    def _drop_if_outdated(self, entry: MemoryEntry) -> None:
        with self._lock:
            versions = [held.version for held in entry.holdings()]
            if entry.origin and versions and versions[0] < self._outdated:
                self._drop([one for one in self._kept if one is entry])

    def _older_than(self, base: Version) -> list[MemoryEntry]:
        """Return memories with nothing as fresh as this."""
        return [
            entry
            for entry in self._kept
            if (held := entry.freshest()) is None or held.version < base
        ]

    def adopt(self, alive: Collection[str]) -> bool:
        """Take over replicas of nodes that are not among these: they may be the last copies, and
        nobody else replicates them now. Return whether there were any."""
        with self._lock:
            orphans = [entry for entry in self._kept if entry.origin and entry.origin not in alive]
            for entry in orphans:
                entry.origin = ""
            return bool(orphans)

    def drop_damaged(self, piece: str, version: Version) -> None:
        """Check all copies of a version and drop the damaged ones."""
        with self._lock:
            found = [
                (entry, os.dup(entry.descriptor))
                for entry in self._kept
                if entry.piece == piece and entry.find(version) is not None
            ]
        for entry, descriptor in found:
            if not _is_whole(descriptor, version):
                with self._lock:
                    entry.void.add(version)

    def _drop(self, entry: Iterable[MemoryEntry]) -> None:
        """Drop these, except those that are being copied in."""
        for item in entry:
            if not item.writing.locked():
                self._kept.remove(item)
                item.close()

    def close(self) -> None:
        """Close all memories. No transfer may be running."""
        with self._lock:
            self._drop(list(self._kept))


def _is_whole(descriptor: int, version: Version) -> bool:
    """Return whether a memory holds this version undamaged; close the descriptor."""
    try:
        memory = Memory(descriptor, writable=False)
    finally:
        os.close(descriptor)
    held = memory.find(version)
    whole = held is not None and held.is_whole()
    memory.close()
    return whole
