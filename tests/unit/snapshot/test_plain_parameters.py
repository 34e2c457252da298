"""Which parameters count as different between ranks, and what is said about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchelastic.errors import ConfigError
from torchelastic.snapshot.plain_parameters import (
    PlainParameters,
    different_forms,
    different_values,
)
from torchelastic.tensors import agreement

NORMAL = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
NAN, INFINITY = float("nan"), float("inf")


class Model(nn.Module):
    """One parameter, and buffers that may differ."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=values.is_floating_point())
        self.register_buffer("mean", torch.randn(3))


def checked(monkeypatch, *ranks):
    """The check of the first rank, given the values of one parameter on each."""
    others = []
    monkeypatch.setattr(agreement, "extremes", lambda mine: others.append(mine) or (mine, mine))
    for values in ranks:
        parameters = PlainParameters([Model(values)])
        parameters.find()
        parameters.check()
    found = torch.stack(others)
    monkeypatch.setattr(agreement, "extremes", lambda _: (found.amin(0), found.amax(0)))
    monkeypatch.setattr(agreement, "gather", lambda _: [one[0].tolist() for one in others])
    parameters.check()


@pytest.mark.parametrize(
    "ranks",
    [
        (NORMAL, NORMAL),
        (NORMAL, NORMAL * (1 + 1e-6)),
        (NORMAL.bfloat16(), NORMAL.bfloat16() * 1.01),
        (NORMAL.t(), NORMAL.t().contiguous()),
        (torch.zeros(5), torch.zeros(5)),
        (torch.tensor(3.0), torch.tensor(3.0)),
        (torch.empty(0, 4), torch.empty(0, 4)),
        (NORMAL.to(torch.float8_e4m3fn), NORMAL.to(torch.float8_e4m3fn)),
        (NORMAL.to(torch.complex64), NORMAL.to(torch.complex64)),
        (torch.full((4,), NAN), torch.full((4,), NAN)),
        (torch.full((4,), -INFINITY), torch.full((4,), -INFINITY)),
    ],
)
def test_equal_parameters_are_kept(monkeypatch, ranks):
    checked(monkeypatch, *ranks)


@pytest.mark.parametrize(
    "ranks",
    [
        (NORMAL, NORMAL.flip(0)),
        (NORMAL, NORMAL, NORMAL * (1 + 1e-3)),
        (NORMAL.bfloat16(), NORMAL.bfloat16() * 1.2),
        (torch.zeros(5), torch.tensor([0.0, 0.0, 1e-8, 0.0, 0.0])),
        (torch.tensor(3.0), torch.tensor(4.0)),
        (torch.arange(9), torch.arange(9) + 1),
        (torch.ones(4), torch.full((4,), NAN)),
        (torch.full((4,), INFINITY), torch.full((4,), -INFINITY)),
    ],
)
def test_different_parameters_are_refused(monkeypatch, ranks):
    with pytest.raises(ConfigError, match="Cannot keep parameter 'weight': it is a plain tensor"):
        checked(monkeypatch, *ranks)


def test_a_parameter_that_is_gone_is_compared_as_zeros(monkeypatch):
    parameters = PlainParameters([model := Model(NORMAL)])
    assert parameters.find() == ("the number of plain parameters", "1")
    del model.weight
    seen = []
    monkeypatch.setattr(agreement, "extremes", lambda mine: seen.append(mine) or (mine, mine))
    parameters.check()
    assert not seen[0].any()


def test_the_rank_that_differs_most_is_named():
    said = [[1.0, 2.0], [1.0, 2.0], [1.0, 2.5], [1.0, 7.0]]
    assert str(different_values("parameter 'experts.weight'", said)) == (
        "Cannot keep parameter 'experts.weight': it is a plain tensor with other values on rank 3 "
        "than on rank 0, and a restart would give all ranks those of one. Fix: make it a DTensor "
        "(docs/guides/parallelism.md), or keep it equal on all ranks; else do not keep it, and "
        "save checkpoints with torch.distributed.checkpoint."
    )


def test_the_first_difference_of_forms_is_named():
    stage = [("parameter 'first.weight'", "float32 of shape (4, 4)")]
    other = [("parameter 'last.weight'", "float32 of shape (4, 4)")]
    assert str(different_forms([stage, stage, other])) == (
        "Cannot keep this state: parameter 'first.weight' exists on rank 0, not on rank 2, and a "
        "restart would give all ranks those of one. Fix: give all ranks the same model, optimizers "
        "and parts; else do not keep it, and save checkpoints with torch.distributed.checkpoint."
    )
