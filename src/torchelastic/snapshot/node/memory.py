"""What a node holds: the memories of its own pieces, and replicas of other nodes'.

The memories are the agent's. They outlive the workers that write to them and the generations, and
are gone when the agent ends. May be used from any thread: none waits here for pages to be taken,
nor for bytes on their way.

A version that is void is not shown any more; it is torn by who writes to that memory next, and by
nobody else, who might tear what has just been sealed in its place. A memory that a version is being
brought to stays until that is done: its descriptor's number would be another file's.

A piece keeps its memory as long as what is to be written fits. Where it does not, or where a later
generation has other pieces, the old memory stays until the new generation has committed often
enough (`ENOUGH`) that no other node can still need it.
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
    Held,
    Memory,
    Sizes,
    Version,
    buffers_for,
    create,
    is_void,
    rank_of,
)
from torchelastic.snapshot.messages import Holding
from torchelastic.system import memory_limit

#: Versions that a node commits in a generation until all others have committed one: one worker may
#: be writing the second when another one writes the first, but never the third: see `buffers_for`.
ENOUGH = 3
#: Of a memory for less than half of which there is any use, the rest is given back.
WASTEFUL = 2
#: Memories for copies of other nodes' pieces: far more than workers on a few nodes. A node gone mad
#: must not make this one hold a file for every name that it makes up.
MOST_REPLICAS = 512


@dataclass(eq=False)
class Kept:
    """A memory on the shelf."""

    piece: str
    #: The node that a replica is of; empty: this one's.
    origin: str
    sizes: Sizes
    descriptor: int
    memory: Memory = field(repr=False)
    #: Whether all its pages are taken.
    is_taken: bool = True
    #: Held by whoever brings a version of it from another node (`SnapshotMemory.bringing`).
    writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    #: Versions that are still in it, and void.
    void: set[Version] = field(default_factory=set, repr=False)
    #: By buffer, how many read it.
    readers: Counter[int] = field(default_factory=Counter, repr=False)

    def holdings(self) -> list[Held]:
        """What it holds that is not void, the freshest first."""
        return [held for held in self.memory.holdings() if held.version not in self.void]

    def freshest(self) -> Held | None:
        return next(iter(self.holdings()), None)

    def find(self, version: Version) -> Held | None:
        return next((held for held in self.holdings() if held.version == version), None)

    def settle(self, base: Version, generation: int) -> None:
        versions = {held.version for held in self.memory.holdings()}
        self.void = {one for one in versions if one in self.void or is_void(one, base, generation)}

    def tear_void(self) -> None:
        """For who is about to write: only then is nobody else."""
        for version in self.void:
            self.memory.drop(version)
        self.void = set()

    def fits(self, wanted: Sizes) -> bool:
        has = self.sizes
        return (
            wanted.bytes <= has.bytes <= max(WASTEFUL * wanted.bytes, 1 << 20)
            and wanted.skeleton <= has.skeleton
            and wanted.buffers <= has.buffers
        )

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


@dataclass
class _Left:
    """Of a memory in the making, the bytes whose pages are yet to be taken."""

    bytes: int


class SnapshotMemory:
    """The memories of one node."""

    def __init__(self, *, replicated: bool = False) -> None:
        """`replicated`: other nodes get copies, from a buffer that no worker writes to then."""
        self._replicated = replicated
        #: Whether there are nodes that copies go to: then these, too, must be of a generation.
        self.awaits_replicas = False
        self._lock = threading.Lock()
        self._kept: list[Kept] = []
        #: Pieces, with their origins, whose memory is being made; and those who wait for that.
        self._in_making: set[tuple[str, str]] = set()
        self._is_made = threading.Condition(self._lock)
        #: Bytes of pages that are yet to be taken, of memories in the making.
        self._promised = 0
        #: Of a generation, how often its freshest own piece was sealed here.
        self._sealed: Counter[tuple[int, str]] = Counter()
        #: The latest version of each, so that one that is told of twice counts once.
        self._heard: dict[str, Version] = {}

    # --- room ------------------------------------------------------------------------------------

    def make_room(self, piece: str, size: int, skeleton: int, *, take: bool = True) -> Kept:
        """The memory that a worker of this node is to write a piece to; without its pages, if it is
        new, where they are not wanted yet."""
        buffers = buffers_for(piece, replicated=self._replicated)
        return self._place(piece, "", Sizes(size, skeleton, buffers), take=take)

    def make_room_for_replica(self, piece: str, origin: str, size: int, skeleton: int) -> Kept:
        """The memory for copies of another node's piece; `NoRoom` also if there are very many."""
        with self._lock:
            if not self._of(piece, origin):
                self._make_way()
        return self._place(piece, origin, Sizes(size, skeleton), take=True)

    def grant(self, piece: str, size: int, skeleton: int) -> int:
        """`make_room`, for another process: a descriptor, the caller's to close."""
        while True:
            kept = self.make_room(piece, size, skeleton)
            with self._lock:
                if kept in self._kept:  # else it was let go of in between
                    return os.dup(kept.descriptor)

    @contextmanager
    def bringing(self, kept: Kept) -> Iterator[bool]:
        """Whether a version may be brought to this memory now. It stays as long as this lasts."""
        with self._lock:
            may = kept in self._kept and kept.writing.acquire(blocking=False)
            if may:
                kept.tear_void()
        try:
            yield may
        finally:
            if may:
                kept.writing.release()

    def _place(self, piece: str, origin: str, wanted: Sizes, *, take: bool) -> Kept:
        rank_of(piece)  # a bad name is refused here
        with self._making(piece, origin):
            with self._lock:
                kept = self._fitting(piece, origin, wanted)
                if kept is None:
                    self._drop(self._empty(piece, origin))
                    memory_limit.check(
                        wanted.total, f"snapshots of '{piece}'", promised=self._promised
                    )
                    self._promised += wanted.total
            if kept is None:
                return self._make(piece, origin, wanted, take=take)
            if take and not kept.is_taken:
                self._take_pages(kept)
            return kept

    @contextmanager
    def _making(self, piece: str, origin: str) -> Iterator[None]:
        """One at a time for each piece, and without keeping anybody else waiting."""
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

    def _fitting(self, piece: str, origin: str, wanted: Sizes) -> Kept | None:
        for kept in self._of(piece, origin):
            if kept.fits(wanted):
                # The one that is written to is the last: those before it only wait to go.
                self._kept.remove(kept)
                self._kept.append(kept)
                return kept
        return None

    def _make(self, piece: str, origin: str, sizes: Sizes, *, take: bool) -> Kept:
        left = _Left(sizes.total)
        try:
            descriptor = create(sizes, take=take, taken=lambda size: self._taken(left, size))
        finally:
            self._taken(left, left.bytes)
        made = Kept(piece, origin, sizes, descriptor, Memory(descriptor), take)
        with self._lock:
            self._kept.append(made)
        return made

    def _taken(self, left: _Left, size: int) -> None:
        with self._lock:
            self._promised -= size
            left.bytes -= size

    def _take_pages(self, kept: Kept) -> None:
        with self._lock:
            if kept not in self._kept:
                return
            descriptor = os.dup(kept.descriptor)
        try:
            layout.take_pages(descriptor, kept.sizes)
            kept.is_taken = True
        finally:
            os.close(descriptor)

    def _make_way(self) -> None:
        """Of too many replicas, drop those of which nothing has come: each is a file, too."""
        replicas = [kept for kept in self._kept if kept.origin]
        if len(replicas) < MOST_REPLICAS:
            return
        self._drop([kept for kept in replicas if kept.freshest() is None])
        if sum(bool(kept.origin) for kept in self._kept) >= MOST_REPLICAS:
            raise memory_limit.NoRoom(
                f"This node already holds {MOST_REPLICAS} copies of other nodes' snapshots, the "
                "limit: run fewer workers per node, or fewer replicas."
            )

    def _of(self, piece: str, origin: str) -> list[Kept]:
        return [kept for kept in self._kept if (kept.piece, kept.origin) == (piece, origin)]

    def _empty(self, piece: str, origin: str) -> list[Kept]:
        return [kept for kept in self._of(piece, origin) if kept.freshest() is None]

    # --- looking ---------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """All versions of all pieces, as the memories have them now."""
        with self._lock:
            return tuple(
                Holding(
                    kept.piece,
                    held.version,
                    len(held.data),
                    held.rank,
                    held.size,
                    replica=bool(kept.origin),
                )
                for kept in self._kept
                for held in kept.holdings()
            )

    def open(self, piece: str, version: Version) -> int | None:
        """A descriptor, the caller's to close, of a memory that holds this; None: none does."""
        with self._lock:
            found = self._find(piece, version)
            return os.dup(found[0].descriptor) if found is not None else None

    @contextmanager
    def reading(self, piece: str, version: Version | None) -> Iterator[tuple[Memory, int, Held]]:
        """A version to read: pinned, and there for as long as this lasts, whatever becomes of the
        shelf; `KeyError` if it is not held. None is the freshest that workers here have written."""
        with self._lock:
            found = self._find(piece, version)
            if found is None:
                raise KeyError(piece)
            kept, held = found
            descriptor = os.dup(kept.descriptor)
            kept.readers[held.index] += 1
            kept.memory.pin(held)
        memory = Memory(descriptor)
        try:
            found_there = memory.find(held.version)
            if found_there is None:  # overwritten just now
                raise KeyError(piece)
            yield memory, descriptor, found_there
        finally:
            self._end_reading(kept, memory, held)
            memory.close()
            os.close(descriptor)

    def _end_reading(self, kept: Kept, memory: Memory, held: Held) -> None:
        with self._lock:
            kept.readers[held.index] -= 1
            if not kept.readers[held.index]:
                memory.unpin(held)

    def _find(self, piece: str, version: Version | None) -> tuple[Kept, Held] | None:
        """Own memories before replicas, the freshest of all if no version is given."""
        found = [
            (kept, held)
            for kept in self._kept
            for held in kept.holdings()
            if kept.piece == piece and version in (None, held.version)
            if version is not None or not kept.origin
        ]
        order = sorted(found, key=lambda pair: (bool(pair[0].origin), -pair[1].number))
        if version is None:
            order = sorted(found, key=lambda pair: pair[1].version, reverse=True)
        return order[0] if order else None

    def fresher_than(self, known: Mapping[str, Version]) -> list[str]:
        """Pieces of this node's workers of which it has something fresher than somebody knows of;
        the shared one, which every node writes for itself, is none of them."""
        with self._lock:
            pieces = dict.fromkeys(kept.piece for kept in self._kept if not kept.origin)
            return [
                piece
                for piece in pieces
                if rank_of(piece) is not None
                and (found := self._find(piece, None)) is not None
                and (piece not in known or known[piece] < found[1].version)
            ]

    # --- letting go ------------------------------------------------------------------------------

    def sealed(self, written: Sequence[tuple[str, Version]]) -> None:
        """Workers of this node have written these pieces, of these versions."""
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
        """This version has all its replicas."""
        with self._lock:
            self._note_replicated([(piece, version)])
            self._let_go(version[0])

    def _note_replicated(self, pieces: Sequence[tuple[str, Version]]) -> None:
        for piece, version in pieces:
            for kept in self._of(piece, ""):
                kept.memory.note_replicated(version)

    def _let_go(self, generation: int) -> None:
        """Drop what is of older generations, if this one does not need it any more.

        Of a generation that gets no replicas, because nobody has room for them, the one before is
        kept in their stead, and no more: memory must not grow with the number of generations.
        """
        if max(self._in(generation), default=0) < ENOUGH:
            return
        noted = [kept.memory.replicated() for kept in self._kept if not kept.origin]
        safe = not self.awaits_replicas or any(item and item[0] >= generation for item in noted)
        self._drop(self._stale(generation if safe else generation - 1))
        for key in [key for key in self._sealed if key[0] < generation]:
            del self._sealed[key]

    def _in(self, generation: int) -> list[int]:
        return [count for (number, _), count in self._sealed.items() if number == generation]

    def _stale(self, generation: int) -> list[Kept]:
        """What has nothing of this generation, nor a later one: nobody goes back to it."""
        return [
            kept
            for kept in self._kept
            if (held := kept.memory.freshest()) is not None and held.version[0] < generation
        ]

    def settle(self, base: Version, generation: int, *, outside: bool = False) -> None:
        """Forget the versions that are void: see `layout.is_void`.

        A node `outside` that generation's world, on which nobody writes, also gives back the memory
        of all that is older than the base: nobody will ask for it.
        """
        with self._lock:
            for kept in self._kept:
                kept.settle(base, generation)
            if outside:
                self._drop(self._older_than(base))

    def _older_than(self, base: Version) -> list[Kept]:
        """What has nothing as fresh."""
        return [
            kept for kept in self._kept if (held := kept.freshest()) is None or held.version < base
        ]

    def adopt(self, alive: Collection[str]) -> bool:
        """Make our own what is a replica of a node that is not among these: nobody else brings it
        to others any more, and it may be the last one. Says whether there is any."""
        with self._lock:
            orphans = [kept for kept in self._kept if kept.origin and kept.origin not in alive]
            for kept in orphans:
                kept.origin = ""
            return bool(orphans)

    def drop_damaged(self, piece: str, version: Version) -> None:
        """Forget a version wherever its bytes are not what was sealed; they are all looked at."""
        with self._lock:
            found = [
                (kept, os.dup(kept.descriptor))
                for kept in self._kept
                if kept.piece == piece and kept.find(version) is not None
            ]
        for kept, descriptor in found:
            if not _is_whole(descriptor, version):
                with self._lock:
                    kept.void.add(version)

    def _drop(self, kept: Iterable[Kept]) -> None:
        """But for what is being brought here."""
        for item in kept:
            if not item.writing.locked():
                self._kept.remove(item)
                item.close()

    def close(self) -> None:
        """Nobody brings anything any more."""
        with self._lock:
            self._drop(list(self._kept))


def _is_whole(descriptor: int, version: Version) -> bool:
    """Whether a memory has this version whole; closes the descriptor."""
    try:
        memory = Memory(descriptor, writable=False)
    finally:
        os.close(descriptor)
    held = memory.find(version)
    whole = held is not None and held.is_whole()
    memory.close()
    return whole
