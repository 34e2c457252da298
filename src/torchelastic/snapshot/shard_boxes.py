"""The boxes of sharded tensors: which bytes of which piece make up a shard. Pure.

A shard is a *box* of its tensor: an offset and a size in each dimension. What a rank needs is cut
out of the boxes that the pieces hold, whatever world has written them; the rest is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and how long it is."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def is_empty(self) -> bool:
        return 0 in self.size

    def common(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty.

        >>> Box((0, 0), (4, 3)).common(Box((2, 1), (9, 9)))
        Box(offset=(2, 1), size=(2, 2))
        """
        offset = tuple(map(max, self.offset, other.offset))
        size = tuple(map(lambda end, begin: end - begin, map(min, self._end, other._end), offset))
        return Box(offset, size) if all(length > 0 for length in size) else None

    def without(self, hole: Box) -> Iterator[Box]:
        """Return the rest as disjoint boxes; `hole` lies in this one.

        >>> list(Box((0,), (9,)).without(Box((3,), (2,))))
        [Box(offset=(0,), size=(3,)), Box(offset=(5,), size=(4,))]
        """
        offset, size = list(self.offset), list(self.size)
        for dim, (begin, length) in enumerate(zip(hole.offset, hole.size, strict=True)):
            end = offset[dim] + size[dim]
            for low, high in ((offset[dim], begin), (begin + length, end)):
                if low < high:
                    yield Box(
                        (*offset[:dim], low, *offset[dim + 1 :]),
                        (*size[:dim], high - low, *size[dim + 1 :]),
                    )
            offset[dim], size[dim] = begin, length

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(map(int.__add__, self.offset, self.size))


@dataclass(frozen=True)
class Shape:
    """A tensor as a whole, without its elements."""

    dtype: str
    size: tuple[int, ...]


#: The box that a piece holds of each tensor, by the tensor's name.
Index = Mapping[str, Box]


@dataclass(frozen=True)
class Take:
    """A part of a tensor to copy from a piece."""

    name: str
    piece: str
    box: Box


def takes(needs: Index, pieces: Sequence[tuple[str, Index]]) -> tuple[list[Take], list[str]]:
    """Return the source of each needed box, and the names of those that the pieces do not cover.

    If several pieces hold a part, the first is taken.
    """
    found: list[Take] = []
    lost = []
    for name, need in needs.items():
        left = [] if need.is_empty() else [need]
        for piece, index in pieces:
            if not left:
                break
            if name in index:
                cut, left = _cut(left, index[name])
                found.extend(Take(name, piece, box) for box in cut)
        if left:
            lost.append(name)
    return found, lost


def _cut(boxes: Iterable[Box], held: Box) -> tuple[list[Box], list[Box]]:
    """Split the boxes into the parts that are held and the rest."""
    cut, rest = [], []
    for box in boxes:
        common = box.common(held)
        if common is None:
            rest.append(box)
        else:
            cut.append(common)
            rest.extend(box.without(common))
    return cut, rest


def within(held: Box, part: Box) -> tuple[slice, ...]:
    """Return the slices of a part within its held box.

    >>> within(Box((4, 0), (4, 8)), Box((6, 0), (2, 3)))
    (slice(2, 4, None), slice(0, 3, None))
    """
    starts = map(int.__sub__, part.offset, held.offset)
    return tuple(
        slice(start, start + length) for start, length in zip(starts, part.size, strict=True)
    )
