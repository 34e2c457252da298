"""What a `Guard` does in the steps of one worker."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchelastic import torch_backends
from torchelastic.errors import NonRetryableException
from torchelastic.training.step_guard import Guard
from torchelastic.training.step_judge import StepJudge
from torchelastic.training.torch_state import TorchState

GOOD, BAD = 1.0, math.nan


class Steps:
    """A script's steps: of one optimizer, or of two that write after backwards of their own."""

    def __init__(self, optimizers: int = 1, copy: bool | None = None, **settings) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(3, 2) for _ in range(optimizers)]
        self.optimizers = [torch.optim.Adam(one.parameters()) for one in self.models]
        self.guard = Guard(**{"min_steps": 4, **settings})
        self.bad = []
        self.guard.listeners.append(self.bad.append)
        self.state = TorchState(
            model=self.models,
            optimizer=self.optimizers,
            guard=self.guard,
            noise=0.0,
            copy_before_write=copy,
        )
        self.state.restore()

    def take(self, *factors: float, loss: float | None = None) -> None:
        for model, optimizer, factor in zip(self.models, self.optimizers, factors, strict=True):
            optimizer.zero_grad()
            (model(torch.rand(5, 3)).square().mean() * factor).backward()
            if loss is not None:
                self.guard.loss(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        self.state.noise = float(torch.rand(()))
        self.state.commit()

    def all(self) -> list:
        values = [one.clone() for model in self.models for one in model.parameters()]
        states = [one["exp_avg"].clone() for o in self.optimizers for one in o.state.values()]
        return [*values, *states, torch.get_rng_state(), torch.tensor(self.state.noise)]


def assert_equal(found: list, expected: list) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ((BAD, GOOD), "the gradient is not finite"),
        ((GOOD, math.inf), "the gradient is not finite"),
        ((GOOD, 1e6), "the norm of the gradient is a spike"),
    ],
)
def test_bad_step_of_two_optimizers_is_undone_whole(bad, reason):
    steps = Steps(optimizers=2)
    for _ in range(5):
        steps.take(GOOD, GOOD)
    before = steps.all()
    steps.take(*bad)
    assert_equal(steps.all(), before)
    assert (steps.state.step, steps.guard.history.bad, steps.guard.history.skipped) == (6, (6,), 6)
    assert (steps.bad[0].reason, steps.bad[0].is_origin) == (reason, "finite" in reason)
    steps.take(GOOD, GOOD)
    assert steps.bad[1:] == []
    assert not torch.equal(steps.all()[0], before[0])


@pytest.mark.parametrize(("loss", "reason"), [(BAD, "not finite"), (500.0, "a spike")])
def test_bad_loss_makes_the_step_bad(loss, reason):
    steps = Steps()
    for _ in range(5):
        steps.take(GOOD, loss=1.0)
    before = steps.all()
    steps.take(GOOD, loss=loss)
    assert_equal(steps.all(), before)
    assert steps.bad[0].reason.endswith(reason)
    assert steps.bad[0].is_origin


def test_values_of_good_steps_alone_are_remembered():
    steps = Steps()
    for factor in (GOOD, BAD, GOOD):
        steps.take(factor, loss=factor)
    ((norms, losses),) = steps.guard.history.windows
    assert (len(norms), losses) == (2, (1.0, 1.0))


def test_step_that_the_scaler_skips_is_not_bad():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, guard = torch.amp.GradScaler("cpu", init_scale=2.0**127), Guard(min_steps=1)
    state = TorchState(model=model, optimizer=optimizer, scaler=scaler, guard=guard)
    state.restore()
    scales = []
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().mean() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        state.commit()
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**127
    assert guard.history.bad == ()
    # Norms are those of unscaled gradients.
    assert all(0 < one < 1e5 for one in guard.history.windows[0].norms)


def test_write_without_a_copy_ends_training_that_cannot_undo_it():
    steps = Steps(optimizers=2, copy=False)
    with pytest.raises(NonRetryableException, match="Pass copy_before_write"):
        steps.take(GOOD, BAD)


def test_stop_keeps_the_state_before_the_step():
    steps = Steps(limit=2)
    steps.take(GOOD)
    steps.take(BAD)
    before = steps.all()
    with pytest.raises(NonRetryableException, match="Training ends: step 3 is bad"):
        steps.take(BAD)
    assert_equal(steps.all(), before)
    assert steps.state.step == 2


@pytest.mark.parametrize(("is_sharded", "norm"), [(False, 5.0), (True, 10.0)])
def test_norm_of_whole_gradients_does_not_grow_with_the_number_of_ranks(
    monkeypatch, is_sharded, norm
):
    monkeypatch.setattr(torch_backends, "here", lambda: "cpu")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda square: square.mul_(4))
    judge = StepJudge(Guard(), lambda: [torch.tensor([3.0, 4.0])], [])
    judge.is_local, judge.is_sharded = True, is_sharded
    judge.measure()
    assert judge._global_norm() == pytest.approx(norm)


def test_script_cannot_repeat_a_step():
    with pytest.raises(ValueError, match="a script takes its steps itself"):
        Steps(on_bad="retry")
    steps = Steps(on_bad=lambda bad: "retry")
    with pytest.raises(ValueError, match="a script takes its steps itself"):
        steps.take(BAD)
