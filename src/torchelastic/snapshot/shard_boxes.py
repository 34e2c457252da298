"""The boxes of sharded tensors: which bytes of which piece make up a shard. Pure.

What a rank needs of a tensor is cut out of the boxes that the pieces hold, whatever world has
written them; the rest is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.tensors.shard_layout import Box, Region


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
