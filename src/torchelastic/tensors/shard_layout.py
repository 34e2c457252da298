"""The layout of a sharded tensor: which part of the whole tensor a rank holds. Pure.

Every mesh dimension that shards a tensor *splits* one of its dimensions as `torch.chunk` does:
equal parts, then a shorter one, then empty ones. Splits of the same dimension follow the mesh from
left to right, each within the part that the one before it left.

A *strided* split (FSDP2 on top of tensor parallelism) comes after splits on its right: FSDP2 cuts
the part that tensor parallelism left. Its factor is the number of parts that these make. (torch
describes it from left to right, as a cut of each of `factor` parts. That is the same only if the
dimension can be divided evenly, so a rank's real shape decides: `dtensors.region_of` checks it.)
Without such splits on its right, a strided split does cut each of `factor` parts, and a rank holds
several boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Where it begins, and how long it is.
Range = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and how long it is."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

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

    def __str__(self) -> str:
        """Return it as an index.

        >>> str(Box((4, 0), (2, 3)))
        '[4:6, 0:3]'
        """
        ends = zip(self.offset, self._end, strict=True)
        return f"[{', '.join(f'{low}:{high}' for low, high in ends)}]"

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(map(int.__add__, self.offset, self.size))


@dataclass(frozen=True)
class Region:
    """The part of a tensor that a rank holds: the indices of each dimension, as ranges.

    They are ascending, not empty, and not adjacent. A rank stores them without the gaps.
    """

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def of_boxes(cls, boxes: Iterable[Box]) -> Region:
        """Return the region that `boxes` returned these of.

        >>> Region.of_boxes(box for box, _ in Region((((0, 1), (4, 1)), ((0, 3),))).boxes())
        Region(ranges=(((0, 1), (4, 1)), ((0, 3),)))
        """
        dims = zip(*(zip(box.offset, box.size, strict=True) for box in boxes), strict=True)
        return cls(tuple(tuple(sorted(set(ranges))) for ranges in dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranges)

    def boxes(self) -> list[tuple[Box, tuple[int, ...]]]:
        """Return its boxes, and where each begins in the rank's own tensor.

        >>> Region((((0, 1), (4, 1)), ((0, 3),))).boxes()[1]
        (Box(offset=(4, 0), size=(1, 3)), (1, 0))
        """
        dims = []
        for ranges in self.ranges:
            begins = itertools.accumulate((length for _, length in ranges), initial=0)
            dims.append([(*one, at) for one, at in zip(ranges, begins, strict=False)])
        return [
            (
                Box(tuple(begin for begin, _, _ in cell), tuple(length for _, length, _ in cell)),
                tuple(at for _, _, at in cell),
            )
            for cell in itertools.product(*dims)
        ]


@dataclass(frozen=True)
class Split:
    """The split of a tensor's dimension by a mesh dimension, on the rank at `index` in it."""

    dim: int
    parts: int
    index: int
    #: The number of parts that a strided split comes after; 1: it is not strided.
    factor: int = 1


def region(shape: Sequence[int], splits: Sequence[Split]) -> Region:
    """Return the part of a tensor of this shape that is left after all splits, in mesh order.

    >>> region((8,), [Split(0, 2, 1), Split(0, 2, 0)])
    Region(ranges=(((4, 2),),))
    >>> region((8,), [Split(0, 2, 1, factor=2), Split(0, 2, 0)])
    Region(ranges=(((2, 2),),))
    >>> region((8,), [Split(0, 2, 1, factor=2)])
    Region(ranges=(((2, 2), (6, 2)),))
    """
    dims = []
    for dim, length in enumerate(shape):
        left: list[Range] = [(0, length)] if length else []
        for split in _in_order([one for one in splits if one.dim == dim]):
            left = [
                found
                for number in range(split.factor)
                for part in [_chunk(left, split.factor, number)]
                for found in _chunk(part, split.parts, split.index)
            ]
        dims.append(tuple(_joined(left)))
    return Region(tuple(dims))


def _in_order(splits: Sequence[Split]) -> list[Split]:
    """Return the splits of a dimension in the order in which they cut: strided ones after the
    splits that their factor stands for."""
    order: list[Split] = []
    for split in reversed(splits):
        counts = [math.prod(one.parts for one in order[:at]) for at in range(len(order) + 1)]
        if split.factor > 1 and split.factor in counts:
            plain = Split(split.dim, split.parts, split.index)
            order.insert(counts.index(split.factor), plain)
        else:
            order.insert(0, split)
    return order


def _chunk(ranges: Sequence[Range], parts: int, index: int) -> list[Range]:
    """Return one part of what the ranges stand for, as `torch.chunk` makes them."""
    length = sum(count for _, count in ranges)
    each = -(-length // parts)
    low, high = each * index, min(each * (index + 1), length)
    found, at = [], 0
    for begin, count in ranges:
        first, last = max(low - at, 0), min(high - at, count)
        if first < last:
            found.append((begin + first, last - first))
        at += count
    return found


def _joined(ranges: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for begin, count in ranges:
        if found and sum(found[-1]) == begin:
            begin, count = found[-1][0], found.pop()[1] + count
        found.append((begin, count))
    return found


# --- which bytes of which piece make up a part ----------------------------------------------------

# The boxes of sharded tensors: which bytes of which piece make up a shard. Pure.
#
# What a rank needs of a tensor is cut out of the boxes that the pieces hold, whatever world has
# written them; the rest is lost.


@dataclass(frozen=True)
class TensorShape:
    """A tensor as a whole, without its elements."""

    dtype: str
    size: tuple[int, ...]


#: The part that a piece holds of each tensor, by the tensor's name.
Index = Mapping[str, Region]


@dataclass(frozen=True)
class Take:
    """A part of a tensor to copy from a piece."""

    name: str
    piece: str
    box: Box
    #: Where it begins in the piece's tensor, and in the rank's own.
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Lost:
    """A part of a tensor that no piece holds."""

    name: str
    box: Box

    def __str__(self) -> str:
        return f"{self.box} of {self.name}" if self.box.size else self.name


def takes(needs: Index, pieces: Sequence[tuple[str, Index]]) -> tuple[list[Take], list[Lost]]:
    """Return the source of each needed part, and the parts that the pieces do not cover.

    If several pieces hold a part, the first is taken.
    """
    found: list[Take] = []
    lost = []
    for name, need in needs.items():
        for box, at in need.boxes():
            left = [box]
            for piece, index in pieces:
                if not left:
                    break
                if name in index:
                    cut, left = _cut(left, index[name])
                    found += [
                        Take(name, piece, part, source, _within(box, at, part))
                        for part, source in cut
                    ]
            lost += [Lost(name, part) for part in left]
    return found, lost


def _cut(boxes: Sequence[Box], held: Region) -> tuple[list[tuple[Box, tuple[int, ...]]], list[Box]]:
    """Split the boxes into the parts that are held, with their place in it, and the rest."""
    cut = []
    left = list(boxes)
    for whole, at in held.boxes():
        rest = []
        for box in left:
            common = box.common(whole)
            if common is None:
                rest.append(box)
            else:
                cut.append((common, _within(whole, at, common)))
                rest.extend(box.without(common))
        left = rest
    return cut, left


def _within(whole: Box, at: Sequence[int], part: Box) -> tuple[int, ...]:
    """Return where a part of a box begins, if the box begins at `at`.

    >>> _within(Box((4, 0), (4, 8)), (1, 0), Box((6, 2), (2, 3)))
    (3, 2)
    """
    return tuple(
        begin + place - offset
        for begin, place, offset in zip(part.offset, at, whole.offset, strict=True)
    )
