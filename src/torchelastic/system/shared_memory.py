"""Memory that processes share: created by one, mapped by any that gets its descriptor.

A memfd, not a file in /dev/shm: that has 64 MB in an ordinary pod. Writers map it, so that a write
costs no system call. Readers of a few bytes use `pread` and need no mapping.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from struct import Struct
from typing import Any

PAGE = mmap.PAGESIZE


def create(name: str, size: int, *, sealable: bool = False) -> int:
    """Create a memory of zeros; the caller owns the descriptor. Pages are allocated when written.

    `sealable`: `seal_size` may be called later.
    """
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0)
    descriptor = os.memfd_create(f"torchelastic-{name}", flags)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal_size(descriptor: int) -> None:
    """Fix the size for good: shrinking a memory would kill its readers."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def map_memory(descriptor: int, *, writable: bool = True) -> mmap.mmap:
    """Map the whole memory."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=access)


def paged(size: int) -> int:
    """Round up to whole pages."""
    return -(-size // PAGE) * PAGE


class SharedMemory:
    """A memory of this process: its descriptor, for others, and its mapping."""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = create(name, size)
        self.map = map_memory(self.descriptor)

    def close(self) -> None:
        self.map.close()
        os.close(self.descriptor)


class Field:
    """Values at a fixed offset of a memory, or of each of its rows.

    Write them with `pack_into(memory, field.at, ...)`, which is `Struct`'s own: a method that adds
    the offset would double the time of a write.
    """

    def __init__(self, form: str, at: int = 0) -> None:
        packed = Struct(form)
        self.at, self.size, self.end = at, packed.size, at + packed.size
        self.span = slice(self.at, self.end)
        self.pack, self.pack_into = packed.pack, packed.pack_into
        self.unpack, self._unpack_from = packed.unpack, packed.unpack_from

    def of(self, data: bytes | mmap.mmap | memoryview, begin: int = 0) -> tuple[Any, ...]:
        """Return the values in the data of a memory, or of its row that begins at `begin`."""
        return self._unpack_from(data, begin + self.at)

    def read(self, descriptor: int) -> tuple[Any, ...] | None:
        """Read the values without a mapping; None if the memory was truncated."""
        data = os.pread(descriptor, self.size, self.at)
        return self.unpack(data) if len(data) == self.size else None


class Text:
    """A text of limited length in a row: its length, then its bytes, up to the row's end."""

    def __init__(self, at: int, end: int) -> None:
        self._length = Field("@H", at)
        #: The most bytes.
        self.room = end - self._length.end

    def write(self, memory: mmap.mmap, row: int, text: bytes) -> None:
        """Write at most `room` bytes to the row that begins at this offset."""
        at = row + self._length.end
        self._length.pack_into(memory, row + self._length.at, len(text))
        memory[at : at + len(text)] = text

    def of(self, row: bytes) -> str:
        """Return the text in the data of a row, whatever that is."""
        (length,) = self._length.of(row)
        at = self._length.end
        return row[at : at + min(length, self.room)].decode(errors="ignore")
