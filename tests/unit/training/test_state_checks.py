"""Copies and hashes of a state: what is pinned, and what a worker can go back to."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from torchelastic.training.state_checks import NONE
from torchelastic.training.step_guard import Guard
from torchelastic.training.torch_state import TorchState


class Worker:
    """A state with checks, and what it reports."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        guard = Guard(check_every=1)
        self.state = TorchState(model=model, optimizer=optimizer, ddp=False, guard=guard, best=0)
        self.checks = self.state._checks()
        self.told: list[tuple[int, tuple[int, int], int]] = []

    def step(self) -> None:
        self.state.optimizer.zero_grad()
        self.state.model(torch.randn(4, 64)).pow(2).mean().backward()
        self.state.optimizer.step()
        self.state.best += 1

    def check(self, step: int, certified: tuple[int, int] = NONE) -> None:
        self.checks.begin((0, step), certified, lambda *told: self.told.append(told))
        self.checks.wait()

    def bits(self) -> list[bytes]:
        found = [*self.state.model.parameters()]
        found += [one for held in self.state.optimizer.state.values() for one in held.values()]
        return [one.detach().numpy().tobytes() for one in found]


@pytest.fixture
def worker():
    return Worker()


def test_flip_of_the_same_bit_in_any_two_elements_changes_the_hash(worker):
    worker.step()
    worker.check(1)
    parameter = worker.state.optimizer.state[worker.state.model.weight]["exp_avg"]
    bits = parameter.view(-1).view(torch.int32)
    for _ in range(20):
        pair = random.Random(len(worker.told)).sample(range(len(bits)), 2)
        bits[pair] ^= 1 << 12
        worker.check(1)
        bits[pair] ^= 1 << 12
    worker.check(1)
    digests = [digest for digest, _, _ in worker.told]
    assert digests[0] == digests[-1]
    assert len({*digests}) == 21


def test_worker_goes_back_to_the_certified_copy_and_redoes_the_same_bits(worker):
    worker.step()
    worker.check(1)
    before, drawn = worker.bits(), torch.get_rng_state()
    worker.step()
    after = worker.bits()
    worker.check(2, certified=(0, 1))
    assert worker.told[-1][1] == (0, 1)
    worker.step()
    assert worker.checks.go_back((0, 1))
    assert (worker.bits(), worker.state.best, worker.state.step) == (before, 1, 1)
    torch.set_rng_state(drawn)
    worker.step()
    assert worker.bits() == after


def test_copy_that_is_not_certified_is_replaced_by_the_next(worker):
    for step in (1, 2, 3):
        worker.step()
        worker.check(step)
    assert [pinned for _, pinned, _ in worker.told] == [NONE] * 3
    assert not worker.checks.go_back((0, 1))
    assert not worker.checks.go_back((0, 2))


def test_damaged_copy_is_not_used(worker, caplog):
    worker.step()
    worker.check(1)
    worker.check(2, certified=(0, 1))
    worker.checks._pin.tensors[0].view(-1)[5] += 1
    now = worker.bits()
    assert not worker.checks.go_back((0, 1))
    assert worker.bits() == now
    assert "damaged" in caplog.text


def test_copy_beyond_the_state_of_a_new_world_is_dropped(worker):
    """All workers were lost in between: an older checkpoint was loaded."""
    worker.check(5)
    worker.check(6, certified=(0, 5))
    worker.checks.began_at((-1, 3))
    assert not worker.checks.go_back((0, 5))


def test_step_that_gives_another_result_when_taken_again_is_noted(worker):
    def steps(values: dict[int, float]) -> None:
        for step, value in values.items():
            assert worker.checks.traces.are_wanted((step, 0, 0), is_first=True)
            worker.checks.traces.note((step, 0, 0), [torch.full((3,), value), None])

    worker.step()
    worker.check(1)
    steps({1: 0.5, 2: 0.25, 3: 0.125})
    worker.step()
    worker.check(4, certified=(0, 1))
    assert worker.checks.go_back((0, 1))
    worker.step()
    steps({1: 0.5, 2: 0.26, 3: 0.13})
    worker.checks.begin((1, 4), (0, 1), lambda *told: worker.told.append(told))
    worker.checks.wait()
    assert [odd for _, _, odd in worker.told] == [-1, -1, 2]


def test_state_with_another_hash_after_the_same_steps_is_noted_as_their_last(worker):
    worker.step()
    worker.check(1)
    worker.check(2, certified=(0, 1))
    assert worker.checks.go_back((0, 1))
    worker.step()
    worker.checks.begin((1, 2), (0, 1), lambda *told: worker.told.append(told))
    worker.checks.wait()
    assert worker.told[-1][2] == 2


def test_copy_stays_sound_when_training_goes_on_from_it(worker):
    worker.step()
    worker.check(1)
    worker.check(2, certified=(0, 1))
    before = worker.bits()
    worker.state.optimizer.state.clear()
    for _ in range(2):
        assert worker.checks.go_back((0, 1))
        assert worker.bits() == before
        worker.step()
