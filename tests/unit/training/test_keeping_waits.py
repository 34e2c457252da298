"""Waiting in a script: from the last gradient to the optimizer's step, and nothing else."""

import pytest
import torch
from torch import nn

from torchelastic import stalls
from torchelastic.training import keeping_waits
from torchelastic.training.keeping_waits import BackwardWaits


class Hands:
    """A clock that goes on by itself: a second at each look."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        self.at += 1.0
        return self.at


@pytest.fixture
def hands(monkeypatch):
    made = Hands()
    monkeypatch.setattr(keeping_waits, "time", made)
    before = list(stalls.seconds)
    yield made
    stalls.seconds[:] = type(stalls.seconds)("d", before)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))


def waited(before: float) -> float:
    return stalls.seconds[stalls.COUNTED.index("peers")] - before


def test_it_is_waited_from_the_last_gradient_to_the_step_of_the_optimizer(hands, model):
    before = waited(0.0)
    waits = BackwardWaits([model])
    model(torch.ones(1, 3)).sum().backward()
    assert hands.at == 102.0, "a look for the first parameter and one for the last"
    hands.at += 7.0
    waits.before_write()
    assert waited(before) == 8.0
    waits.before_write()  # a second optimizer waits for nothing
    assert waited(before) == 8.0


def test_of_several_backwards_the_last_counts(hands, model):
    before = waited(0.0)
    waits = BackwardWaits([model])
    for _ in range(3):
        hands.at += 50.0
        model(torch.ones(1, 3)).sum().backward()
    waits.before_write()
    assert waited(before) == 1.0


def test_gradients_that_no_optimizer_takes_up_are_forgotten(hands, model):
    before = waited(0.0)
    waits = BackwardWaits([model])
    model(torch.ones(1, 3)).sum().backward()
    waits.committed()
    hands.at += 50.0
    waits.before_write()
    assert waited(before) == 0.0


def test_what_is_counted_as_something_else_is_not_counted_twice(hands, model):
    before = waited(0.0)
    waits = BackwardWaits([model])
    model(torch.ones(1, 3)).sum().backward()
    hands.at += 7.0
    stalls.add("checkpoint", 5.0)
    waits.before_write()
    assert waited(before) == 3.0


def test_parameters_that_are_not_trained_are_passed_over_and_shared_ones_noted_once(hands, model):
    model[0].requires_grad_(False)
    BackwardWaits([model, model])
    model(torch.ones(1, 3)).sum().backward()
    assert hands.at == 102.0
