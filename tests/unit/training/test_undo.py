"""A step that fails anywhere and is done again leads to the same bits as one that never failed."""

import logging

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.unit.training.undo_support import (
    TRAININGS,
    Interrupted,
    Sampler,
    built,
    outcome,
    points_of,
    stop_at,
    take,
)
from torchelastic import faults
from torchelastic.training.state import Torn
from torchelastic.training.torch_state import TorchState

STEPS = 6


def undisturbed(name, **options):
    state, step = built(name, **options)
    for _ in range(STEPS):
        take(state, step)
    return outcome(state)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_stopped_at_any_point_is_redone_to_the_same_bits(name):
    expected, points = undisturbed(name, copy_before_write=True), points_of(name)
    state, step = built(name, copy_before_write=True)
    for number in range(STEPS):
        take(state, step, interrupted_at=number % len(points))
    assert outcome(state) == expected
    state, step = built(name, copy_before_write=True)
    for _ in range(STEPS):  # every step fails at every point, one after the other
        for point in points:
            with pytest.raises(Interrupted):
                fail(state, step, point)
        take(state, step)
    assert outcome(state) == expected


@pytest.mark.parametrize("name", TRAININGS)
def test_before_a_write_nothing_was_copied_and_the_bits_are_the_same(name):
    expected = undisturbed(name, copy_before_write=False)
    state, step = built(name, copy_before_write=False)
    for number in range(STEPS):
        take(state, step, interrupted_at=number % TRAININGS[name].before_write)
    assert outcome(state) == expected
    assert not any(copy._parameter_copies for copy in state._undo.writes._copies.values())


def fail(state, step, point):
    begin = state.snapshot()
    try:
        step(state, stop_at(point))
    finally:
        state.apply(begin)


# --- writes ---------------------------------------------------------------------------------------


class HalfWritten(SGD):
    """Fails when it has written its first parameter, if told to."""

    failing = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.failing:
            return super().step(closure)
        first = self.param_groups[0]["params"][0]
        first.add_(1.0)
        self.state[first]["momentum_buffer"] = torch.ones_like(first)
        self.state[first]["new"] = 1
        raise Interrupted("half-way")


def half_written(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = HalfWritten(model.parameters(), lr=0.1, momentum=0.9)
    return TorchState(model=model, optimizer=optimizer, **options)


def plain_step(state, point=lambda: None):
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    point()
    state.optimizer.zero_grad()


def fail_half_way(state):
    begin = state.snapshot()
    state.optimizer.failing = True
    with pytest.raises(Interrupted):
        plain_step(state)
    state.optimizer.failing = False
    state.apply(begin)


@pytest.mark.parametrize(
    ("committed", "options"),
    [
        (0, {"copy_before_write": True}),
        (1, {"copy_before_write": True}),
        (3, {"copy_before_write": True}),
        (0, {}),  # nothing is known of the first write
    ],
)
def test_half_written_parameters_and_state_are_put_back_from_the_copy(committed, options):
    state, expected = half_written(**options), half_written(**options)
    for _ in range(committed):
        take(state, plain_step)
        take(expected, plain_step)
    fail_half_way(state)
    take(state, plain_step)
    take(expected, plain_step)
    assert outcome(state) == outcome(expected)


def test_a_torn_state_can_be_loaded_into_and_goes_on():
    state, holder = half_written(), half_written()
    for one in (state, holder):
        take(one, plain_step)
    with pytest.raises(Torn):
        fail_half_way(state)
    state._load(holder._tree())
    take(state, plain_step)
    take(holder, plain_step)
    assert outcome(state) == outcome(holder)


def test_a_collective_after_a_write_makes_every_write_copied_and_says_so_once(caplog):
    state, expected = half_written(), half_written()
    for one in (state, expected):
        one._undo.enter(0, None)
        take(one, plain_step)

    def with_reduced_loss(state, point=lambda: None):
        plain_step(state)
        state._undo.before_collective()
        point()

    with caplog.at_level(logging.WARNING):
        take(state, with_reduced_loss)
        take(state, with_reduced_loss, interrupted_at=0)
    for _ in range(2):
        take(expected, plain_step)
    assert {**outcome(state), ".copying": None} == {**outcome(expected), ".copying": None}
    (record,) = caplog.records
    assert "runs after" in record.message


def test_a_collective_before_the_write_changes_nothing(caplog):
    state = half_written()
    state._undo.enter(0, None)
    for _ in range(3):
        state.snapshot()
        state._undo.before_collective()
        plain_step(state)
        state._committed((0, state.step + 1))
        state._undo.before_collective()
    assert state._undo.writes.known is False
    assert caplog.records == []


def test_fault_points_are_passed_before_in_and_after_a_write(request):
    request.addfinalizer(lambda: faults.plan(""))
    for place, torn in (("before", False), ("inside", True), ("after", True)):
        state = half_written()
        take(state, plain_step)
        begin = state.snapshot()
        faults.plan(f"raise@generation=any,place=optimizer.{place}")
        with pytest.raises(faults.FaultInjected):
            plain_step(state)
        if torn:
            with pytest.raises(Torn, match=rf"{place} optimizer\.step"):
                state.apply(begin)
        else:
            state.apply(begin)


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_zeroed_at_the_start_or_the_end_are_never_copied():
    for name in ("foreach Adam", "momentum", "zeroed in place", "two optimizers"):
        state, step = built(name)
        for _ in range(3):
            take(state, step)
        assert not state._undo.gradients.wanted, name


def test_gradients_clipped_in_a_step_without_backward_are_lost_once_then_copied_in_time():
    state, _ = built("accumulated across steps")

    def alternate(state, point):
        if state.step % 2 == 0:
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 8)).sum().backward()
        else:
            nn.utils.clip_grad_norm_(state.module.parameters(), 0.01)
            point()
            state.optimizer.step()

    take(state, alternate)
    with pytest.raises(Torn, match="Gradients"):
        fail(state, alternate, 0)
    state.snapshot()
    alternate(state, lambda: None)
    state._committed((0, 2))
    take(state, alternate)
    with pytest.raises(Interrupted):
        fail(state, alternate, 0)


def test_a_gradient_that_came_in_the_step_is_gone_after_it():
    state = half_written()
    with pytest.raises(Interrupted):
        fail(state, lambda s, point: (s.model(torch.ones(1, 4)).sum().backward(), point()), 0)
    assert all(parameter.grad is None for parameter in state.module.parameters())


# --- buffers and values ---------------------------------------------------------------------------


class Replacing(nn.Module):
    """Replaces, grows and fills its buffers in forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("later", None)
        self.register_buffer("mask", torch.zeros(200, 200))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, data):
        self.count = self.count + 1
        self.cache = torch.arange(int(self.count) + 1.0)
        self.later = self.count.double()
        self.mask[0, 0] += 1
        self.scratch += 2
        return (self.weight * data).sum()


def test_buffers_that_are_replaced_grown_or_large_are_put_back():
    model = Replacing()
    state = TorchState(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    def step(state, point):
        state.model(torch.ones(3)).backward()
        point()

    for number in range(3):
        if number:
            take(state, step)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with pytest.raises(Interrupted):
            fail(state, step, 0)
        after = dict(model.named_buffers())
        assert list(after) == list(before)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_large_buffer_that_does_not_change_is_copied_once():
    model = Replacing()
    state = TorchState(model=model)
    state.snapshot()
    (heavy,) = [one for one in state._undo.buffers.heavy if one._name == "mask"]
    first = heavy._saved
    first.fill_(7)
    state.snapshot()
    assert heavy._saved is first
    assert bool((first == 7).all())


def test_values_of_every_kind_are_put_back():
    state = TorchState(
        best=0.5, history=[1], names=("a", (2, 3)), table={1: {"x": None}},
        weights=torch.ones(3), array=numpy.zeros(2), epoch=4,
    )  # fmt: skip
    kept = state.weights
    begin = state.snapshot()
    state.best, state.epoch, state.names = 0.7, 5, ("b",)
    state.history.append(2)
    state.table[1]["x"] = 3
    state.weights += 1
    state.array[0] = 9
    state.apply(begin)
    assert (state.best, state.epoch, state.names) == (0.5, 4, ("a", (2, 3)))
    assert (state.history, state.table, state.array.tolist()) == ([1], {1: {"x": None}}, [0, 0])
    assert state.weights is kept
    assert kept.tolist() == [1, 1, 1]


def test_a_snapshot_can_be_applied_twice_but_only_the_latest():
    state = TorchState(history=[1], sampler=Sampler())
    older = state.snapshot()
    begin = state.snapshot()
    for _ in range(2):
        state.history.append(2)
        next(state.sampler)
        state.apply(begin)
        assert (state.history, state.sampler.position) == ([1], 0)
    with pytest.raises(ValueError, match="latest"):
        state.apply(older)


def test_a_parameter_group_added_in_the_step_is_gone():
    model = nn.Linear(2, 2)
    optimizer = Adam([model.weight])
    state = TorchState(model=model, optimizer=optimizer)
    begin = state.snapshot()
    optimizer.add_param_group({"params": [model.bias], "lr": 7.0})
    state.apply(begin)
    assert len(optimizer.param_groups) == 1
