"""The order of an epoch: a permutation, the same everywhere, and as good as a random one."""

import itertools
import math
from collections import Counter

import pytest
import torch

from torchelastic.data import order as order_module
from torchelastic.data.order import Order


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 81, 100, 2999])
def test_each_sample_has_one_position(length):
    for seed, epoch in itertools.product((-5, 0, 1 << 70), (0, 9)):
        assert sorted(Order(length, seed, epoch).at(0, length)) == list(range(length))


def test_order_is_pinned():
    """A job that goes on with another release must go on in the same order."""
    assert Order(10, 0, 0).at(0, 10) == [9, 2, 1, 3, 4, 0, 6, 7, 8, 5]
    assert Order(10**9, 7, 3).at(123_456_789, 123_456_793) == [
        324917963,
        308934402,
        134780555,
        819707533,
    ]


def test_order_depends_on_seed_epoch_and_window():
    orders = [Order(50, *key).at(0, 50) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]]
    assert len(set(map(tuple, orders))) == len(orders)


def test_parts_of_it_fit_together(monkeypatch):
    whole = Order(1000, 3, 0).at(0, 1000)
    monkeypatch.setattr(order_module, "_BLOCK", 64)
    order = Order(1000, 3, 0)
    for start, stop in [(0, 1000), (63, 65), (999, 1000), (10, 10), (500, 700), (0, 64)]:
        assert order.at(start, stop) == whole[start:stop]


def test_a_thousand_million_samples_take_no_memory():
    order = Order(10**9, 0, 0)
    assert len(set(order.at(0, 1000) + order.at(10**9 - 1000, 10**9))) == 2000
    assert len(order._block) <= order_module._BLOCK


def test_positions_outside_are_refused():
    with pytest.raises(IndexError):
        Order(5, 0).at(3, 6)
    with pytest.raises(ValueError, match="2\\*\\*60"):
        Order(-1, 0)


def spread(observed, expected, freedom):
    """By how many standard deviations chi-square is off what chance gives."""
    chi = sum((count - expected) ** 2 / expected for count in observed)
    return (chi - freedom) / math.sqrt(2 * freedom)


def test_all_permutations_come_equally_often():
    counts = Counter(tuple(Order(3, seed, 0).at(0, 3)) for seed in range(300))
    observed = [counts[one] for one in itertools.permutations(range(3))]
    assert abs(spread(observed, 300 / 6, 5)) < 4


@pytest.mark.parametrize("length", [1000, 65536 + 7])
def test_order_positions_are_uniform(length):
    """Both where a sample is put, and which come after each other, as in a random order."""
    samples = torch.tensor(Order(length, 5, 2).at(0, length))
    positions = torch.arange(length)
    cells = (samples * 10 // length) * 10 + positions * 10 // length
    assert abs(spread(cells.bincount(minlength=100).tolist(), length / 100, 81)) < 4
    steps = (samples[1:] - samples[:-1]) % length
    observed = (steps * 20 // length).bincount(minlength=20).tolist()
    assert abs(spread(observed, (length - 1) / 20, 19)) < 4
    correlation = torch.corrcoef(torch.stack([samples, positions]).double())[0, 1]
    assert abs(correlation.item()) < 4 / math.sqrt(length)


def test_epochs_are_not_alike():
    """No sample is at the same place, or near it, in two epochs more often than by chance."""
    length = 10_000
    first, second = (torch.tensor(Order(length, 0, epoch).at(0, length)) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert abs(torch.corrcoef(torch.stack([first, second]).double())[0, 1].item()) < 0.04
