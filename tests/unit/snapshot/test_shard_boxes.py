"""Shards of one world put together for another: a table, and any world to any other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import SOAK
from torchelastic.snapshot.shard_boxes import Box, Take, takes, within


def chunks(length, count):
    """How DTensor cuts a dimension: equal ones, a shorter one, empty ones."""
    each = -(-length // count)
    bounds = [min(number * each, length) for number in range(count + 1)]
    return [(begin, end - begin) for begin, end in itertools.pairwise(bounds)]


def boxes(shape, mesh):
    """The shards of a tensor whose first dimensions are cut by the mesh's, by rank."""
    cuts = [chunks(length, count) for length, count in zip(shape, mesh, strict=True)]
    return [
        Box(tuple(begin for begin, _ in cut), tuple(length for _, length in cut))
        for cut in itertools.product(*cuts)
    ]


def cells(box):
    ranges = [range(b, b + n) for b, n in zip(box.offset, box.size, strict=True)]
    return set(itertools.product(*ranges))


def pieces_of(held):
    return [(f"piece {rank}", {"w": box}) for rank, box in enumerate(held)]


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
    found, lost = takes({"w": boxes(shape, new)[rank]}, pieces_of(boxes(shape, old)))
    assert found == [Take("w", f"piece {piece}", Box(*box)) for piece, *box in expected]
    assert lost == []


worlds = st.integers(1, 7)


@given(
    st.tuples(st.integers(0, 12), st.integers(0, 9)),
    st.tuples(worlds, worlds),
    st.tuples(worlds, worlds),
)
@settings(max_examples=50 * SOAK)
def test_any_world_reads_what_any_other_has_written(shape, old, new):
    pieces = pieces_of(boxes(shape, old))
    held = dict(pieces)
    for need in boxes(shape, new):
        found, lost = takes({"w": need}, pieces)
        assert lost == []
        taken = [cell for take in found for cell in cells(take.box)]
        assert len(taken) == len(set(taken))  # each once
        assert set(taken) == cells(need)
        assert all(cells(take.box) <= cells(held[take.piece]["w"]) for take in found)


@given(st.integers(1, 12), worlds, worlds, st.integers(0, 6))
@settings(max_examples=50 * SOAK)
def test_a_lost_piece_is_noticed_by_whom_it_concerns(length, old, new, missing):
    held = boxes((length,), (old,))
    lost_cells = cells(held[missing % old])
    left = [box for rank, box in enumerate(held) if rank != missing % old]
    for need in boxes((length,), (new,)):
        _, lost = takes({"w": need}, pieces_of(left))
        assert bool(lost) == bool(cells(need) & lost_cells)


def test_of_copies_the_first_is_taken_and_a_number_is_a_box_without_dimensions():
    whole, number = Box((0,), (4,)), Box((), ())
    for box in (whole, number):
        found = takes({"w": box}, pieces_of([box, box]))
        assert found == ([Take("w", "piece 0", box)], [])
    assert takes({"w": number}, []) == ([], ["w"])
    assert within(number, number) == ()
