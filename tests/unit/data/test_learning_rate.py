"""Schedules by samples, against torch's own with the same samples in equal batches."""

import warnings
from functools import cache

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.learning_rate import SampleSchedule
from torchelastic.errors import ConfigError
from torchelastic.training.torch_state import TorchState

UNIT = 8


def warmup_then_cosine(optimizer):
    warmup = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of SequentialLR's way to begin
        return lrs.SequentialLR(
            optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, T_max=40)], milestones=[5]
        )


SCHEDULERS = {
    "StepLR": lambda optimizer: lrs.StepLR(optimizer, 3, gamma=0.7),
    "ExponentialLR": lambda optimizer: lrs.ExponentialLR(optimizer, 0.93),
    "CosineAnnealingLR": lambda optimizer: lrs.CosineAnnealingLR(optimizer, T_max=40),
    "OneCycleLR": lambda optimizer: lrs.OneCycleLR(optimizer, 0.5, total_steps=1000),
    "LambdaLR": lambda optimizer: lrs.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": warmup_then_cosine,
}
BATCHES = st.lists(st.integers(0, 40), max_size=12)


def optimizer(rate=0.1):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    made = torch.optim.SGD([{"params": [one]} for one in parameters], lr=rate, momentum=0.9)
    made.param_groups[1]["lr"] = rate / 3 if isinstance(rate, float) else rate.clone()
    return made


def rates(made):
    return [float(group["lr"]) for group in made.param_groups]


def plain(name, steps):
    """Torch's own scheduler after so many steps."""
    return trajectory(name)[steps]


@cache
def trajectory(name):
    made = optimizer()
    scheduler = SCHEDULERS[name](made)
    made.step()
    found = [rates(made)]
    for _ in range(100):
        scheduler.step()
        found.append(rates(made))
    return found


@pytest.fixture
def world(monkeypatch):
    def of(size):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    of(1)
    return of


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(10)
@example(batches=[UNIT] * 29)  # equal ones are the scheduler itself
@given(batches=BATCHES)
def test_the_rate_depends_on_the_samples_alone(name, batches):
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT)
    for number, batch in enumerate(batches, 1):
        made.step()
        schedule.step(batch)
        assert schedule.samples == sum(batches[:number])
        assert rates(made) == schedule.get_last_lr() == plain(name, schedule.samples // UNIT)


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(10)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12), data=st.data())
def test_the_factor_of_one_world_leaves_nothing_in_the_next(name, sizes, data):
    """Bitwise, and though everything is loaded into new objects somewhere on the way."""
    policy = BatchPolicy.scale_with_world(UNIT, lr_rule="sqrt", base_size=2)
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT, policy=policy)
    restart = data.draw(st.integers(0, len(sizes)))
    samples = 0
    with pytest.MonkeyPatch.context() as patch:
        for number, size in enumerate(sizes):
            if number == restart:
                made, schedule = loaded(name, made, schedule, policy)
            patch.setenv("RANK", "0")
            patch.setenv("WORLD_SIZE", str(size))
            made.step()
            expected = [rate * policy.lr_factor(size) for rate in plain(name, samples // UNIT)]
            assert rates(made) == expected
            schedule.step()
            samples += UNIT * size


def loaded(name, old, old_schedule, policy):
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT, policy=policy)
    made.load_state_dict(old.state_dict())
    made.step()  # so that torch does not warn of the order
    schedule.load_state_dict(old_schedule.state_dict())
    return made, schedule


def test_a_step_uses_the_rate_of_the_world_it_is_taken_in(world):
    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    policy = BatchPolicy.scale_with_world(1)
    SampleSchedule(lrs.StepLR(made, 100), unit=1, policy=policy)
    (parameter,) = made.param_groups[0]["params"]
    for size, left in ((2, -1.0), (3, -4.0), (1, -5.0)):
        world(size)
        parameter.grad = torch.ones(1)
        made.step()
        assert parameter.item() == left


def test_a_rate_that_is_a_tensor_stays_that_tensor(world):
    made = optimizer(torch.tensor(0.5))
    held = made.param_groups[0]["lr"]
    policy = BatchPolicy.scale_with_world(UNIT)
    schedule = SampleSchedule(lrs.StepLR(made, 1, gamma=0.5), unit=UNIT, policy=policy)
    world(2)
    made.step()
    assert made.param_groups[0]["lr"] is held
    assert held.item() == 1.0
    schedule.step()  # two units
    assert held.item() == 0.25


def test_a_step_of_a_torch_state_is_undone_with_it(world):
    model = torch.nn.Linear(1, 1)
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = BatchPolicy.scale_with_world(UNIT)
    schedule = SampleSchedule(lrs.StepLR(made, 1, gamma=0.5), unit=UNIT, policy=policy)
    state = TorchState(model=model, optimizer=made, scheduler=schedule)
    world(4)
    made.step()
    snapshot = state.snapshot()
    schedule.step()
    assert schedule.samples == 4 * UNIT
    world(2)
    state.apply(snapshot)
    assert (schedule.samples, schedule.scheduler.last_epoch) == (0, 0)
    assert rates(made) == schedule.get_last_lr() == [2.0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=0), "unit is 0"),
        (lambda made: SampleSchedule(lrs.ReduceLROnPlateau(made), unit=1), "step it yourself"),
        (
            lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=1).step(),
            "needs the samples of all ranks",
        ),
        (lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=1).step(-1), "samples is -1"),
        (
            lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=9).load_state_dict(
                SampleSchedule(lrs.StepLR(made, 1), unit=8).state_dict()
            ),
            "unit is 9, but this state was saved with 8",
        ),
    ],
)
def test_schedule_refuses_invalid_arguments(wrong, told):
    with pytest.raises(ConfigError, match=told):
        wrong(optimizer())
