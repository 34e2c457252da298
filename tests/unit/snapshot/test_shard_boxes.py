"""Shards of one world put together for another: a table, and any world to any other."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import SOAK
from torchelastic.tensors.shard_layout import Box, Lost, Region, Split, Take, region, takes


def parts(shape, mesh):
    """The shards of a tensor whose first dimensions are cut by the mesh's, by rank."""
    return [
        region(shape, [Split(dim, mesh[dim], at) for dim, at in enumerate(place)])
        for place in itertools.product(*map(range, mesh))
    ]


def strided(length, mesh):
    """The shards of FSDP2 on top of column-wise tensor parallelism, by rank."""
    return [
        region((length,), [Split(0, mesh[0], data, mesh[1]), Split(0, mesh[1], tensor)])
        for data, tensor in itertools.product(*map(range, mesh))
    ]


def cells(boxes):
    """The elements of boxes, and how often each is there."""
    return Counter(
        cell
        for box in boxes
        for cell in itertools.product(
            *(range(b, b + n) for b, n in zip(box.offset, box.size, strict=True))
        )
    )


def boxes(part):
    return [box for box, _ in part.boxes()]


def values(part):
    """A rank's own tensor: each element is its place in the whole one."""
    found = {}
    for box, at in part.boxes():
        for cell in itertools.product(*map(range, box.size)):
            found[tuple(map(int.__add__, at, cell))] = tuple(map(int.__add__, box.offset, cell))
    return found


def pieces_of(held):
    return [(f"piece {rank}", {"w": part}) for rank, part in enumerate(held)]


def check(need, held):
    """Copying gives a rank the elements it needs, each once, at its place."""
    found, lost = takes({"w": need}, pieces_of(held))
    assert lost == []
    made = {}
    for take in found:
        source = values(held[int(take.piece.removeprefix("piece "))])
        for cell in itertools.product(*map(range, take.box.size)):
            target = tuple(map(int.__add__, take.target, cell))
            assert target not in made
            made[target] = source[tuple(map(int.__add__, take.source, cell))]
    assert made == values(need)


@pytest.mark.parametrize(
    ("shape", "old", "new", "rank", "expected"),
    [
        ((4,), (2,), (2,), 1, [(1, (2,), (2,))]),
        ((4,), (2,), (1,), 0, [(0, (0,), (2,)), (1, (2,), (2,))]),
        ((5,), (2,), (3,), 1, [(0, (2,), (1,)), (1, (3,), (1,))]),
        ((3,), (2,), (4,), 3, []),  # more ranks than rows: nothing is needed
        ((4, 6), (2, 1), (1, 2), 1, [(0, (0, 3), (2, 3)), (1, (2, 3), (2, 3))]),
    ],
)
def test_where_a_shard_comes_from(shape, old, new, rank, expected):
    found, lost = takes({"w": parts(shape, new)[rank]}, pieces_of(parts(shape, old)))
    assert [(take.piece, take.box) for take in found] == [
        (f"piece {piece}", Box(*box)) for piece, *box in expected
    ]
    assert lost == []


worlds = st.integers(1, 7)
pairs = st.tuples(worlds, worlds)


@given(st.tuples(st.integers(0, 12), st.integers(0, 9)), pairs, pairs)
@settings(max_examples=50 * SOAK)
def test_any_world_reads_what_any_other_has_written(shape, old, new):
    held = parts(shape, old)
    for need in parts(shape, new):
        check(need, held)


@given(st.integers(0, 20), pairs, pairs, worlds)
@settings(max_examples=50 * SOAK)
def test_with_tensor_parallelism_before_after_and_on_both_sides(length, old, new, plain):
    """The meshes may be 4 by 2 before, 2 by 1 afterwards, or one without tensor parallelism."""
    for before, after in itertools.product(
        (strided(length, old), parts((length,), (plain,))),
        (strided(length, new), parts((length,), (plain,))),
    ):
        for need in after:
            check(need, before)


@given(st.integers(0, 20), st.tuples(worlds, st.integers(2, 4)), worlds)
@settings(max_examples=50 * SOAK)
def test_shards_of_several_boxes(length, cut, plain):
    count, factor = cut
    several = [region((length,), [Split(0, count, at, factor)]) for at in range(count)]
    for need in parts((length,), (plain,)):
        check(need, several)
    for need in several:
        check(need, parts((length,), (plain,)))


@given(st.integers(1, 12), worlds, worlds, st.integers(0, 6))
@settings(max_examples=50 * SOAK)
def test_a_lost_piece_is_noticed_by_whom_it_concerns(length, old, new, missing):
    held = parts((length,), (old,))
    lost_cells = cells(boxes(held[missing % old]))
    left = [part for rank, part in enumerate(held) if rank != missing % old]
    for need in parts((length,), (new,)):
        _, lost = takes({"w": need}, pieces_of(left))
        assert cells(one.box for one in lost) == cells(boxes(need)) & lost_cells


def test_of_copies_the_first_is_taken_and_a_number_is_a_box_without_dimensions():
    whole, number = Region((((0, 4),),)), Region(())
    for part in (whole, number):
        ((box, at),) = part.boxes()
        found = takes({"w": part}, pieces_of([part, part]))
        assert found == ([Take("w", "piece 0", box, at, at)], [])
    assert takes({"w": number}, []) == ([], [Lost("w", Box((), ()))])


def test_what_is_lost_is_named():
    _, lost = takes({"w": parts((4, 3), (2, 1))[1], "n": Region(())}, [])
    assert list(map(str, lost)) == ["[2:4, 0:3] of w", "n"]
