"""Who has a state of another form than the freshest is told what is different."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchelastic import TorchState
from torchelastic.training import fitting

LINEAR = (("parameter 'weight'", "float32 of shape (2, 3)"), ("the part 'epoch'", "a value"))


@pytest.mark.parametrize(
    ("own", "others", "says"),
    [
        (
            [("a", "large"), ("b", "x")],
            [("a", "small"), ("b", "x")],
            "a is large here and small in the others",
        ),
        ([("a", ""), ("b", "")], [("a", "")], "it has b, which the others do not have"),
        ([("a", "")], [("a", ""), ("b", "")], "it lacks b, which the others have"),
        ([("a", ""), ("b", "")], [("b", ""), ("a", "")], "it has a where the others have b"),
        ([], [("a", "")], "it lacks a, which the others have"),
    ],
)
def test_the_first_difference_is_said(own, others, says):
    assert fitting.number_of(own) != fitting.number_of(others)
    assert says in fitting._sentence(own, others)


def test_equal_forms_have_equal_numbers_that_fit_into_an_integer_of_torchs():
    assert fitting.number_of(LINEAR) == fitting.number_of([tuple(line) for line in LINEAR])
    assert 0 < fitting.number_of(LINEAR) < 2**63
    assert fitting.number_of(()) == 0


def state(features=3, optimizer=torch.optim.SGD, **more):
    model = nn.Linear(features, 2)
    return TorchState(model=model, optimizer=optimizer(model.parameters(), lr=0.1), **more)


def test_a_torch_state_tells_what_must_be_the_same():
    usual = fitting.number_of(state()._form())
    assert fitting.number_of(state()._form()) == usual
    others = [
        state(features=4),
        state(optimizer=torch.optim.Adam),
        state(best=1),
        TorchState(model=nn.Linear(3, 2).double()),
    ]
    assert usual not in [fitting.number_of(other._form()) for other in others]


def test_what_training_changes_does_not_change_the_form():
    made = state(best=1)
    before = made._form()
    made.model(torch.ones(3)).sum().backward()
    made.optimizer.step()
    made.best, made.epoch = 2.5, 3
    assert made._form() == before
