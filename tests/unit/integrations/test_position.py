"""Coming back to a place in an epoch."""

import random

import pytest

from torchelastic.integrations.position import Skip, batches_done


@pytest.mark.parametrize(
    ("done", "before", "now", "multiple", "expected"),
    [
        (7, 2, 2, 1, 7),
        (7, 2, 1, 1, 14),
        (7, 1, 2, 1, 3),
        (1, 1, 2, 1, 0),
        (9, 4, 3, 1, 12),
        (10, 4, 3, 1, 13),
        (10, 4, 3, 4, 12),
        (7, 2, 2, 4, 7),  # the last step of an epoch may have fewer batches
    ],
)
def test_batches_in_a_world_of_another_size(done, before, now, multiple, expected):
    assert batches_done(done, before=before, now=now, multiple=multiple) == expected


def test_no_sample_is_left_out_by_a_resize():
    for before in range(1, 8):
        for now in range(1, 8):
            for done in range(20):
                again = done * before - batches_done(done, before=before, now=now) * now
                assert 0 <= again < now


def test_one_pass_begins_in_the_middle_and_the_next_does_not():
    behind = []
    skip = Skip([[1], [2], [3]], 2, lambda: behind.append("skipped"))
    assert len(skip) == 3
    iter(skip)
    iterator = iter(skip)  # loaders with worker processes do so
    assert behind == []
    assert next(iterator) == [3]
    assert behind == ["skipped"]
    assert list(iterator) == []
    assert list(skip) == [[1], [2], [3]]
    assert behind == ["skipped"]


def test_an_order_is_drawn_when_it_would_be_drawn_without():
    class Shuffled:
        def __iter__(self):
            yield from random.sample(range(5), 5)

    random.seed(1)
    plain = iter(Shuffled())
    random.random()
    expected = list(plain)
    random.seed(1)
    skipping = iter(Skip(Shuffled(), 2, lambda: None))
    random.random()
    assert list(skipping) == expected[2:]


def test_skip_passes_other_attributes_of_the_sampler():
    class Batches(list):
        batch_size = 4

    assert Skip(Batches(), 0, lambda: None).batch_size == 4
