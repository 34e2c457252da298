"""Small trainings that can be stopped at any point of a step, and what they have led to."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

from torchelastic.tensors import rng
from torchelastic.tensors.tensor_bytes import bytes_of
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
