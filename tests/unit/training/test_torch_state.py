"""TorchState and State: steps undone and redone to the same bits, peers, checkpoints."""

import io
import logging
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

from torchelastic import faults
from torchelastic.errors import TransferError
from torchelastic.tensors import rng, tensor_tree, transfer
from torchelastic.tensors.tensor_bytes import bytes_of
from torchelastic.training import session
from torchelastic.training.state import State, Torn, call_sync, holders_of, is_worthless
from torchelastic.training.torch_state import TorchState

Point = Callable[[], None]
Step = Callable[[TorchState, Point], None]


class Interrupted(RuntimeError):
    """What stands for any failure."""


class Sampler:
    """A position in the data."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __next__(self) -> torch.Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(6, 8, generator=generator)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )


def loss_of(state: TorchState) -> torch.Tensor:
    return state.model(next(state.sampler)).pow(2).mean() * (1 + random.random())


# --- the steps ------------------------------------------------------------------------------------


def zero_at_end(state: TorchState, point: Point) -> None:
    point()
    loss = loss_of(state)
    point()
    loss.backward()
    numpy.random.randn()
    point()
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.epoch = state.sampler.position // 3
    point()


def zero_at_start(state: TorchState, point: Point) -> None:
    point()
    loss = loss_of(state)
    state.optimizer.zero_grad()
    point()
    loss.backward()
    point()
    state.optimizer.step()
    state.scheduler.step()
    point()


def zero_in_place(state: TorchState, point: Point) -> None:
    state.module.zero_grad(set_to_none=False)
    point()
    loss_of(state).backward()
    point()
    state.optimizer.step()


def accumulated_within(state: TorchState, point: Point) -> None:
    for _ in range(3):
        loss_of(state).backward()
        point()
    nn.utils.clip_grad_norm_(state.module.parameters(), 0.1)
    point()
    state.optimizer.step()
    state.optimizer.zero_grad()


def accumulated_across(state: TorchState, point: Point) -> None:
    if state.step % 3 == 0:
        state.optimizer.zero_grad()
    point()
    loss_of(state).backward()
    point()
    if state.step % 3 == 2:
        state.optimizer.step()
        state.scheduler.step()


def two_optimizers(state: TorchState, point: Point) -> None:
    data = next(state.sampler)
    for name, model in state.model.items():
        state.optimizer[name].zero_grad()
        model(data).pow(2).mean().backward()
        point()
        state.optimizer[name].step()
        point()


def scaled(state: TorchState, point: Point) -> None:
    point()
    loss = loss_of(state)
    state.scaler.scale(loss).backward()
    point()
    state.scaler.unscale_(state.optimizer)
    nn.utils.clip_grad_norm_(state.module.parameters(), 0.1)
    point()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()


# --- the trainings --------------------------------------------------------------------------------


def halving(optimizer: Optimizer) -> LRScheduler:
    return MultiStepLR(optimizer, [2, 4], gamma=0.5)


def cyclic(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=100)


def nesterov(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, nesterov=True)


def one(
    make: Callable[..., Optimizer],
    schedule: Callable[[Optimizer], LRScheduler] = halving,
    **arguments: object,
) -> Callable[..., TorchState]:
    def build(**options: object) -> TorchState:
        model = network()
        optimizer = make(model.parameters(), **arguments)
        scheduler = schedule(optimizer)
        return TorchState(
            model=model, optimizer=optimizer, scheduler=scheduler, sampler=Sampler(), **options
        )

    return build


def pair(**options: object) -> TorchState:
    models = {"first": network(), "second": network()}
    optimizers = {name: Adam(model.parameters()) for name, model in models.items()}
    return TorchState(model=models, optimizer=optimizers, sampler=Sampler(), **options)


def with_scaler(**options: object) -> TorchState:
    model = network()
    return TorchState(
        model=model,
        optimizer=Adam(model.parameters(), lr=0.01),
        sampler=Sampler(),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        **options,
    )


class Training(NamedTuple):
    """How one is built and stepped, and how many points of a step come before its first write."""

    build: Callable[..., TorchState]
    step: Step
    before_write: int


TRAININGS = {
    "foreach Adam": Training(one(Adam, lr=0.01, foreach=True), zero_at_end, 3),
    "fused Adam": Training(one(Adam, lr=0.01, fused=True), zero_at_end, 3),
    "single-tensor Adam": Training(one(Adam, lr=0.01, foreach=False), zero_at_start, 3),
    "momentum": Training(one(SGD, lr=0.1, momentum=0.9), zero_at_start, 3),
    "cyclic": Training(one(nesterov, cyclic), zero_at_end, 3),
    "zeroed in place": Training(one(SGD, lr=0.1, momentum=0.9), zero_in_place, 2),
    "accumulated within a step": Training(one(Adam, lr=0.01), accumulated_within, 4),
    "accumulated across steps": Training(one(Adam, lr=0.01), accumulated_across, 2),
    "two optimizers": Training(pair, two_optimizers, 1),
    "GradScaler": Training(with_scaler, scaled, 3),
}


# --- running them ---------------------------------------------------------------------------------


def built(name: str, **options: object) -> tuple[TorchState, Step]:
    """A training at its beginning, with the same seeds every time."""
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    return TRAININGS[name].build(**options), TRAININGS[name].step


def stop_at(number: int) -> Point:
    """Raises when it is passed for the so-manieth time; never for a negative one."""
    passed = iter(range(1 << 30))

    def point() -> None:
        if next(passed) == number:
            raise Interrupted(f"point {number}")

    return point


def take(state: TorchState, step: Step, *, interrupted_at: int = -1) -> None:
    """A step as the loop takes it; with a failure before it, if one is asked for."""
    if interrupted_at >= 0:
        begin = state.snapshot()
        try:
            step(state, stop_at(interrupted_at))
        except Interrupted:
            state.apply(begin)
    state.snapshot()
    step(state, stop_at(-1))
    state._committed((0, state.step + 1))


def points_of(name: str) -> range:
    """The points that a step of the training passes."""
    state, step = built(name)
    state.snapshot()
    passed: list[None] = []
    step(state, lambda: passed.append(None))
    return range(len(passed))


def tensors_of(state: TorchState) -> Iterator[tuple[str, object]]:
    """Everything a training has led to, in comparable form."""
    tree = state._tree()
    for place, value in _leaves("", tree):
        if isinstance(value, torch.Tensor):
            yield (
                place,
                (str(value.dtype), tuple(value.shape), bytes_of(value.contiguous())),
            )
        else:
            yield place, value
    yield "random", rng.capture()


def _leaves(place: str, tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(f"{place}.{key}", value)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves(f"{place}.{number}", value)
    else:
        yield place, tree


def outcome(state: TorchState) -> dict[str, object]:
    return dict(tensors_of(state))


# --- a step that fails anywhere and is done again leads to the same bits as one that never fail---


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


def test_large_buffers_of_a_step_can_be_put_back_after_another_state_was_loaded():
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(70_000))
    undo = TorchState(model=module, optimizer=SGD(module.parameters(), 0.1), ddp=False)._undo
    undo.begin((0, 0))
    module.table.add_(1)
    undo.buffers.find()  # as after a load
    undo.at_beginning()
    assert not module.table.any()


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


# --- parts ----------------------------------------------------------------------------------------


def test_parts_are_found_under_their_names():
    model, sampler = nn.Linear(2, 2), Sampler()
    optimizers = (SGD([model.weight], lr=1.0), SGD([model.bias], lr=2.0))
    state = TorchState(model=model, optimizer=optimizers, sampler=sampler, best=0.5, step=3)
    assert (state.model, state.module, state.optimizer) == (model, model, optimizers)
    assert (state.sampler, state.best, state.step, state.epoch) == (sampler, 0.5, 3, 0)
    assert state.scheduler is None


def test_values_may_be_assigned_and_objects_may_not():
    state = TorchState(model=nn.Linear(1, 1), best=0.5, tracker=Sampler())
    state.best, state.epoch, state.anything = (1, 2), 7, object()
    assert (state.best, state.epoch) == ((1, 2), 7)
    for name in ("model", "tracker"):
        with pytest.raises(AttributeError, match=f"Cannot replace '{name}'"):
            setattr(state, name, None)
    with pytest.raises(TypeError, match="best"):
        state.best = object()


def test_invalid_part_is_refused_by_name():
    unsendable = Sampler()
    unsendable.position = object()
    for given, named in (
        ({"tracker": unsendable}, "position"),
        ({"wrong": object()}, "wrong"),
        ({"wrong": {"deep": [lambda: None]}}, r"wrong\['deep'\]\[0\]"),
        ({"sampler": iter([1])}, "sampler"),
        ({"scheduler": [Sampler(), 3]}, "scheduler"),
        ({"model": Sampler()}, "model"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer"),
        ({"sync": 1}, "sync"),
        ({"_undo": 1}, "_undo"),
        ({"module": nn.Linear(1, 1)}, "module"),
    ):
        with pytest.raises(TypeError, match=named):
            TorchState(**given)


# --- worlds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "holders"),
    [
        ([(0, 3), (0, 3)], (0, 1)),
        ([(0, 3), (0, 4), (-1, 0), (0, 4)], (1, 3)),
        ([(1, 2), (0, 9)], (0,)),
        ([(-1, 0), (-1, 0)], (0,)),
        ([(-2, -1), (-1, 5), (-1, 0)], (1,)),
    ],
)
def test_holders_are_the_ranks_with_the_base(versions, holders):
    assert holders_of(versions, max(versions)) == holders


@pytest.mark.parametrize(
    ("own", "base", "is_whole", "worthless"),
    [
        ((0, 3), (0, 4), True, False),
        ((0, 3), (0, 4), False, True),
        ((-1, 0), (0, 4), True, True),
        ((-2, -1), (0, 4), True, True),
        ((-1, 0), (-1, 5), True, False),
        ((-1, 0), (-1, 5), False, False),
        ((0, 4), (0, 4), False, False),
    ],
)
def test_only_a_state_that_nobody_can_want_is_overwritten_on_the_way(
    own, base, is_whole, worthless
):
    assert is_worthless(own, base, is_whole=is_whole) is worthless


class Wire:
    """Carries one rank's state to another of this process, in the form it has on the network."""

    def __init__(self):
        self.sent = None

    def share(self, world, tree, *, holders, into=None, link=None):
        if world.rank in holders:
            skeleton, tensors = tensor_tree.flatten(tree)
            self.sent = skeleton, [tensor.clone() for tensor in tensors]
            return None
        skeleton, tensors = self.sent
        room = transfer._destination(into)
        specs = tensor_tree.specs(skeleton)
        received = [room(spec).copy_(one) for spec, one in zip(specs, tensors, strict=True)]
        return tensor_tree.restore(skeleton, received)


@pytest.fixture
def wire(monkeypatch):
    made = Wire()
    monkeypatch.setattr(transfer, "share", made.share)
    return made


def enter(state, rank, versions, *, generation=0, status_page=None, copying=None):
    """As the loop does it."""
    world = session.Session(
        rank=rank,
        size=len(versions),
        generation=generation,
        local_rank=rank,
        local_size=len(versions),
        store=None,
        group=SimpleNamespace(before_collective=None, check_collectives=lambda: None),
        versions=tuple(versions),
        ready=(-1,) * len(versions),
        version=versions[rank],
        status_page=status_page,
        copying=copying,
    )
    session.enter(world)
    try:
        state.snapshot()
        state.sync()
    finally:
        session.leave()
    return world


def one_more(state, step, generation):
    """A committed step, with a collective before its write."""
    state.snapshot()
    step(state, lambda: state._undo.before_collective())
    state._committed((generation, state.step + 1))


def trained(name, steps, status_page=None, **options):
    """Alone in the first world, up to this step."""
    state, step = built(name, ddp=False, **options)
    enter(state, 0, [(-1, 0)], status_page=status_page)
    for _ in range(steps):
        one_more(state, step, 0)
    return state, step


def without_random(state):
    return {place: value for place, value in outcome(state).items() if place != "random"}


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "two optimizers"])
def test_a_newcomer_is_given_everything_and_goes_on_to_the_same_bits(name, wire):
    holder, step = trained(name, 4, copy_before_write=False)
    newcomer, _ = built(name, ddp=False, copy_before_write=False)
    parameters = list(newcomer.module.parameters())
    versions = [(0, 4), (-1, 0)]
    enter(holder, 0, versions, generation=1)
    enter(newcomer, 1, versions, generation=1)
    assert newcomer.step == 4
    assert without_random(newcomer) == without_random(holder)
    assert all(
        one is other for one, other in zip(parameters, newcomer.module.parameters(), strict=True)
    )
    results, seeds = [], rng.capture()
    for state in (holder, newcomer):
        rng.restore(seeds)
        for _ in range(3):
            one_more(state, step, 1)
        results.append(without_random(state))
    assert results[0] == results[1]


def test_sync_of_equal_ranks_sends_nothing(wire):
    state, _ = built("momentum", ddp=False)
    enter(state, 0, [(0, 4), (0, 4)], generation=3)
    assert wire.sent is None
    assert state._version == (3, 4)


def test_first_states_that_differ_are_made_equal(wire):
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.BatchNorm1d(3)
        nn.init.normal_(model.weight)
        states.append(TorchState(model=model, ddp=False))
    for rank, state in enumerate(states):
        enter(state, rank, [(-1, 0), (-1, 0)])
    assert without_random(states[0]) == without_random(states[1])


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_replacement_goes_on_with_what_the_dead_had_drawn(ahead, wire, status_page):
    """Killed at the beginning of a step, or after its last collective with its peers a step on."""
    peer, step = trained("foreach Adam", 3, status_page=status_page)
    peer.snapshot()
    if ahead:
        step(peer, lambda: peer._undo.before_collective())
        peer._committed((0, 4))
    expected = rng.capture()
    buffers = peer.module[1].running_mean.clone()
    peer._undo.enter(0, None)  # from here on it is not the one that died
    replacement, _ = built("foreach Adam", ddp=False)
    torch.manual_seed(77)
    versions = [(0, 3 + ahead), (-1, 0)]
    peer.module[1].running_mean.fill_(9)  # a peer's own, not those of the dead
    enter(peer, 0, versions, generation=1)
    enter(replacement, 1, versions, generation=1, status_page=status_page)
    assert rng.capture() == expected
    assert torch.equal(replacement.module[1].running_mean, buffers)


def test_a_survivor_whose_peers_finished_the_step_follows_with_what_it_had_drawn(wire):
    survivor, step = trained("foreach Adam", 3)
    finished, _ = trained("foreach Adam", 3)
    torch.manual_seed(5)
    begin = survivor.snapshot()
    with pytest.raises(Interrupted):
        step(survivor, stop_at(2))
    drawn = outcome(survivor)["random"]
    survivor.apply(begin)
    one_more(finished, step, 0)
    versions = [(0, 3), (0, 4)]
    enter(finished, 1, versions, generation=1)
    enter(survivor, 0, versions, generation=1)
    assert outcome(survivor)["random"] == drawn
    assert without_random(survivor) == without_random(finished)


def test_a_survivor_stays_as_it_rolled_back_if_nobody_is_further(wire):
    survivor, step = trained("foreach Adam", 1)
    begin = survivor.snapshot()
    before = outcome(survivor)
    with pytest.raises(Interrupted):
        step(survivor, stop_at(2))
    survivor.apply(begin)
    enter(survivor, 0, [(0, 1), (0, 1)], generation=1)
    assert outcome(survivor) == before


def test_a_newcomer_knows_from_its_peers_whether_to_copy_before_it_writes(wire):
    holder, _ = trained("zeroed in place", 1)
    newcomer, _ = built("zeroed in place", ddp=False)
    told, _ = built("zeroed in place", ddp=False, copy_before_write=True)
    assert newcomer._undo.writes.known is None
    for rank, state in enumerate((holder, newcomer, told)):
        enter(state, rank, [(0, 1), (-1, 0), (-1, 0)], generation=1, copying=False)
    assert newcomer._undo.writes.known is holder._undo.writes.known is False
    assert told._undo.writes.copying, "what the script has said stands"


def test_another_model_is_refused(wire):
    holder, other = (
        TorchState(model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))), ddp=False)
        for count in (1, 2)
    )
    enter(holder, 0, [(0, 4), (-1, 0)])
    with pytest.raises(TransferError, match="same model"):
        enter(other, 1, [(0, 4), (-1, 0)])


def test_after_another_state_was_loaded_there_is_no_way_back(wire):
    holder, _ = built("momentum", ddp=False)
    newcomer, _ = built("momentum", ddp=False)
    begin = newcomer.snapshot()
    newcomer._load(holder._tree())
    with pytest.raises(Torn, match="loaded"):
        newcomer.apply(begin)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAININGS)
def test_a_checkpoint_holds_everything_but_what_is_private(name):
    saved, step = built(name, copy_before_write=False)
    for _ in range(3):
        take(saved, step)
    stream = io.BytesIO()
    saved.save(stream)
    loaded, _ = built(name, copy_before_write=False)
    stream.seek(0)
    loaded.load(stream)
    assert (loaded.step, loaded._version) == (3, (-1, 3))
    ignored = (".gradients", "random")
    for place, value in outcome(loaded).items():
        if not place.startswith(ignored):
            assert outcome(saved)[place] == value, place


def test_a_checkpoint_gives_the_model_to_whoever_asks_torch_for_it():
    model = nn.Linear(2, 2)
    stream = io.BytesIO()
    TorchState(model=model, table={1: (2, numpy.arange(3))}).save(stream)
    stream.seek(0)
    other = nn.Linear(2, 2)
    other.load_state_dict(torch.load(stream, weights_only=True)["model"])
    assert torch.equal(other.weight, model.weight)


def test_another_file_is_no_checkpoint():
    stream = io.BytesIO()
    torch.save({"model": {}}, stream)
    stream.seek(0)
    with pytest.raises(ValueError, match="not written by a TorchState"):
        TorchState().load(stream)


def test_optimizer_state_of_another_type_than_the_parameters_stays_as_it_is():
    model = nn.Linear(2, 2).bfloat16()
    states = [TorchState(model=model, optimizer=Adam(model.parameters())) for _ in range(2)]
    exact = torch.full((2, 2), 1 / 3)
    states[0].optimizer.state[model.weight] = {"exp_avg": exact, "step": torch.tensor(3.0)}
    states[1]._load(states[0]._tree())
    assert torch.equal(states[1].optimizer.state[model.weight]["exp_avg"], exact)


# --- state: the seed's defaults, and what release 0.1 called things -------------------------------


class Plain(State):
    def __init__(self):
        self.weights = torch.zeros(2)
        self.calls = []

    def sync(self):
        self.calls.append("sync")


class Rolling(Plain):
    def snapshot(self):
        return {"weights": self.weights.clone()}

    def apply(self, snapshot):
        self.weights = snapshot["weights"]


class Old(State):
    """As written for 0.1."""

    def __init__(self):
        self.number = 0
        self.calls = []

    def sync(self, world_size, rank):
        self.calls.append((world_size, rank))

    def capture_snapshot(self):
        return self.number

    def apply_snapshot(self, snapshot):
        self.number = snapshot


class Older(Old):
    def capture_snapshot(self):
        return super().capture_snapshot() + 100


def test_sync_must_be_written():
    with pytest.raises(TypeError, match="sync"):
        State()


def test_rolling_back_is_not_supported_unless_written():
    state = Plain()
    assert state.snapshot() is None
    state.apply(None)
    assert state.should_save_checkpoint(0) is False


def through_a_stream(state):
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    other = type(state)()
    other.load(stream)
    return other


def test_saving_is_saving_the_snapshot():
    state = Rolling()
    state.weights += 1
    assert through_a_stream(state).weights.tolist() == [1, 1]


def test_the_names_of_release_01():
    state = Old()
    state.number = 7
    snapshot = state.snapshot()
    assert snapshot == 7
    state.number = 8
    state.apply(snapshot)
    assert state.number == through_a_stream(state).number == 7
    assert Older().snapshot() == 100, "subclasses of old states are heard"


def test_both_forms_of_sync():
    state, old = Plain(), Old()
    call_sync(state, rank=1, size=3)
    call_sync(old, rank=1, size=3)
    assert state.calls == ["sync"]
    assert old.calls == [(3, 1)]


def test_a_sync_with_options_of_its_own_is_todays():
    class Options(Plain):
        def sync(self, group=None, *more):
            super().sync()

    state = Options()
    call_sync(state, rank=0, size=1)
    assert state.calls == ["sync"]
