"""Each sample once an epoch, whatever the sizes of the worlds; epochs in a row."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import SOAK
from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler


def shares(size, world, start, epoch=0):
    """What each rank gets."""
    samplers = [ElasticDistributedSampler(range(size), world, rank, start) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def train(size, worlds, epoch=0):
    """All samples of an epoch, with their world; `worlds` are (ranks, samples for each rank)."""
    seen, start = [], 0
    for world, each in worlds:
        taken = [share[:each] for share in shares(size, world, start, epoch)]
        seen += [item for turn in itertools.zip_longest(*taken) for item in turn]
        start = min(size, start + world * each)
    return seen


def test_half_an_epoch_on_four_and_the_rest_on_two():
    """With 0.1's, of 1000 samples 252 came twice and 252 never."""
    assert sorted(train(1000, [(4, 125), (2, 250)])) == list(range(1000))


@settings(max_examples=25 * SOAK)
@given(
    size=st.integers(1, 60),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), max_size=6),
    epoch=st.integers(0, 3),
)
def test_no_sample_is_lost_and_only_the_end_is_filled_up(size, worlds, epoch):
    last = 3
    seen = train(size, [*worlds, (last, size)], epoch)
    counts = Counter(seen)
    assert set(counts) == set(range(size))
    assert len(seen) - size < max([last, *(world for world, _ in worlds)])


def test_all_ranks_have_equally_many():
    sampler = ElasticDistributedSampler(range(10), 4, 0, start_index=3)
    assert len(sampler) == 2
    assert [len(share) for share in shares(10, 4, 3)] == [2, 2, 2, 2]
    assert [len(share) for share in shares(10, 4, 9)] == [1, 1, 1, 1]
    assert shares(10, 2, 10) == [[], []]


def test_epochs_differ_and_repeat():
    assert shares(50, 2, 0, epoch=1) != shares(50, 2, 0, epoch=2)
    assert shares(50, 2, 0, epoch=1) == shares(50, 2, 0, epoch=1)


def test_the_next_epoch_begins_at_its_beginning():
    """0.1's skipped the same samples in every later epoch, or failed in the second."""
    sampler = ElasticDistributedSampler(range(10), 1, 0, start_index=8)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 2
    sampler.set_epoch(5)
    assert sorted(sampler) == list(range(10))


@pytest.mark.parametrize("start", [-1, 11])
def test_a_start_outside_the_epoch_is_refused(start):
    with pytest.raises(ValueError, match=f"start_index is {start}"):
        ElasticDistributedSampler(range(10), 1, 0, start)


def test_epochs_in_a_row():
    def items(epoch):
        return [(epoch, item) for item in "ab"]

    assert list(CyclingIterator(3, items, start_epoch=1)) == items(1) + items(2)
    assert list(CyclingIterator(2, items, start_epoch=2)) == []
    iterator = CyclingIterator(1, items)
    assert (next(iterator), next(iterator), next(iterator, None)) == ((0, "a"), (0, "b"), None)
