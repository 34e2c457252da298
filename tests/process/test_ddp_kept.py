"""DDP kept while ranks die, come and go: the parameters are those of an undisturbed run, exactly.

With four ranks the last bit of a sum of gradients tells how the buckets were laid out. These tests
fail when torch changes what `torchelastic.training.group.ddp` relies on.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.process import forked
from tests.process.forked import build, when_lost
from tests.process.weighted_ddp import (
    CASES,
    alone,
    in_a_resident_world,
    in_a_sharded_world,
    in_every_world,
)
from torchelastic.training.group import ddp as kept

# --- one rank of a run whose worlds are given ----------------------------------------------------


@dataclass(frozen=True)
class World:
    """Its workers in the order of their ranks. The first of them lives through all worlds."""

    members: tuple[int, ...]
    #: How many steps are done at its end, or begun if somebody dies in the last.
    until: int
    dies: int | None = None
    #: When it has launched so many collectives of that step.
    at: int = 0


@dataclass(frozen=True)
class Run:
    worlds: tuple[World, ...]
    options: dict[str, Any] = field(default_factory=dict)
    #: In each step.
    backwards: int = 1
    #: So many steps at first do not use the model.
    idle: int = 0
    #: Use DDP as torch has it, made anew in every world.
    plain: bool = False


class Model(nn.Module):
    """Its layers are used in another order than they are defined: buckets are laid out anew."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.last = nn.Linear(31, 3)
        self.first = nn.Linear(17, 37)
        self.second = nn.Linear(37, 31)
        self.unused = nn.Linear(5, 5) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class Worker:
    def __init__(self, number: int, port: int, run: Run) -> None:
        torch.manual_seed(0)
        self.number, self.port, self.run = number, port, run
        unused = {"find_unused_parameters", "static_graph"} & set(run.options)
        self.model = Model(bool(unused))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ddp: Any = None
        self.group: Any = None
        self.step = 0
        #: How many each step has launched.
        self.collectives: list[int] = []
        #: Those that were killed, and the world that this worker is in.
        self._lost: set[int] = set()
        self._world: World | None = None
        self._shipper = threading.Lock()
        when_lost(self._tell_lost)

    def enter(self, generation: int, world: World, interrupted: bool) -> None:
        rank, size = world.members.index(self.number), len(world.members)
        self.group = None
        self.group = build(self.port, rank, size, generation)
        with self._shipper:
            self._world = world
            self._abort_if_lost()
        if self.run.plain:
            self._catch_up()
            self.ddp = nn.parallel.DistributedDataParallel(self.model, **self.run.options)
            return
        if self.ddp is None:
            self.ddp = kept.wrap(self.model, **self.run.options)
        else:
            kept.swap(self.ddp, interrupted=interrupted)
        self._catch_up()
        kept.agree(self.ddp, source=0)

    def leave(self, *, lost: bool) -> None:
        with self._shipper:
            self._world = None
        if self.group is None:
            return  # somebody was lost before all had met
        if lost:
            self.group.abort("a peer is lost")
        self.group.leave()

    def _tell_lost(self, number: int) -> None:
        """In a thread, as an agent's word comes to a worker."""
        with self._shipper:
            self._lost.add(number)
            self._abort_if_lost()

    def _abort_if_lost(self) -> None:
        if self._world is not None and self._lost.intersection(self._world.members):
            self.group.abort("a peer is lost")

    def _catch_up(self) -> None:
        step = torch.tensor(self.step)
        dist.broadcast(step, 0)
        self.step = int(step)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)

    def train(self, world: World) -> None:
        while self.step < world.until:
            before = self.group.launched
            if self.step == world.until - 1 and world.dies == self.number:
                self.group.before_collective = partial(self._die, before + world.at)
            self._train_step()
            self.step += 1
            if not self.run.plain:
                kept.committed(self.ddp)
            self.collectives.append(self.group.launched - before)

    def _die(self, when: int) -> None:
        if self.group.launched >= when:
            os.kill(os.getpid(), signal.SIGKILL)

    def _train_step(self) -> None:
        if self.step < self.run.idle:
            return
        self.optimizer.zero_grad()
        for part in range(self.run.backwards):
            seed = 1000 * self.step + 10 * dist.get_rank() + part
            x = torch.randn(8, 17, generator=torch.Generator().manual_seed(seed))
            self.ddp(x).square().sum().backward()
        self.optimizer.step()

    def digest(self) -> str:
        state = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(state).hexdigest()


def train(number: int, port: int, run: Run) -> tuple[str, list[int]]:
    """Through all worlds that this worker is in: its last parameters, the collectives it did."""
    warnings.simplefilter("ignore")  # DDP's advice on find_unused_parameters
    worker = Worker(number, port, run)
    interrupted = False
    for generation, world in enumerate(run.worlds):
        if number not in world.members:
            continue
        try:
            worker.enter(generation, world, interrupted)
            interrupted = False
            worker.train(world)
        except RuntimeError:
            if world.dies is None:
                raise
            interrupted = True
        worker.leave(lost=interrupted)
    return worker.digest(), worker.collectives


# --- the tests -----------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("forks")

FOUR = (0, 1, 2, 3)
STEPS = 7
#: Small enough for several buckets.
CAP = {"bucket_cap_mb": 0.003}


def run(*worlds, **how):
    """The final states of the last world's members."""
    numbers = sorted({number for world in worlds for number in world.members})
    with forked.ranks(train, numbers, Run(worlds, **how)) as answers:
        for world in worlds:
            assert world.dies is None or answers[world.dies] is None
        return {number: answers[number] for number in worlds[-1].members}


def final(answers):
    """The parameters that all have."""
    digests = {answer[0] for answer in answers.values()}
    assert len(digests) == 1
    return digests.pop()


@functools.cache
def undisturbed(options=(), **how):
    return run(World(FOUR, STEPS), options=CAP | dict(options), **how)


def killed(*deaths, **how):
    """The parameters after rank 2 has died in each of these steps, after so many collectives, and
    another worker has taken its place each time."""
    worlds, members = [], list(FOUR)
    for newcomer, (step, at) in enumerate(deaths, len(FOUR)):
        worlds.append(World(tuple(members), step + 1, dies=members[2], at=at))
        members[2] = newcomer
    return final(run(*worlds, World(tuple(members), STEPS), **how))


def test_the_bits_are_those_of_plain_ddp():
    kept, plain = undisturbed(), undisturbed(plain=True)
    assert final(kept) == final(plain)
    # In the second step the buckets are laid out anew: one broadcast, torch needs two.
    assert kept[0][1] == [1, 3, *[2] * (STEPS - 2)]
    assert plain[0][1] == [1, 4, *[2] * (STEPS - 2)]


def test_a_new_ddp_in_the_middle_of_a_run_would_change_the_bits():
    worlds = World(FOUR, 4), World(FOUR, STEPS)
    assert final(run(*worlds, options=CAP, plain=True)) != final(undisturbed())
    assert final(run(*worlds, options=CAP)) == final(undisturbed())


@pytest.mark.parametrize("deaths", [[(0, 0), (2, 1), (5, 0)], [(1, 0), (1, 1)]])
def test_workers_killed_in_backward_are_replaced(deaths):
    assert killed(*deaths, options=CAP) == final(undisturbed())


@pytest.mark.parametrize(
    "option", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_options_of_ddp_hold(option):
    usual = final(undisturbed(options=((option, True),)))
    assert killed((0, 0), (4, 1), options=CAP | {option: True}) == usual


def test_sizes_given_one_by_one_hold():
    sizes = {"bucket_cap_mb_list": (0.002, 0.004)}
    assert killed((0, 0), (3, 1), options=sizes) == final(run(World(FOUR, STEPS), options=sizes))


def test_the_first_step_is_done_again_as_it_was_begun():
    """Its second backward has other buckets than its first."""
    usual = final(undisturbed(backwards=2))
    assert killed((0, 3), options=CAP, backwards=2) == usual


def test_a_model_may_be_used_late():
    assert killed((2, 0), (3, 1), options=CAP, idle=2) == final(undisturbed(idle=2))


def test_shrink_and_grow():
    """Survivors keep their buckets, newcomers take them, wherever the run is when they come."""
    later = World((0, 1, 3), 4), World((0, 1, 3, 4), STEPS)
    died = run(World(FOUR, 2, dies=2, at=1), *later, options=CAP)
    left = run(World(FOUR, 1), *later, options=CAP)
    assert final(died) == final(left)


def test_one_alone_and_then_more():
    worlds = World((0,), 3), World((0, 1), 5), World((0, 1, 2), STEPS)
    answers = run(*worlds, options=CAP)
    final(answers)
    assert [len(answers[number][1]) for number in (0, 1, 2)] == [7, 4, 2]


# --- unequal shares: the gradient is that of one process, at any size ----------------------------

LARGEST = 5


def check(answers, sizes):
    for size in sizes:
        for case in CASES:
            found = [answers[rank][size, case] for rank in range(size)]
            assert all(one == found[0] for one in found)  # bitwise
            for ours, theirs in zip(found[0], alone(case), strict=True):
                torch.testing.assert_close(
                    torch.tensor(ours, dtype=torch.float64),
                    torch.tensor(theirs, dtype=torch.float64),
                    rtol=1e-12,
                    atol=1e-14,
                )


def test_the_gradient_of_ddp_is_that_of_one_process_at_every_size():
    with forked.ranks(in_every_world, list(range(LARGEST)), LARGEST) as answers:
        check(answers, range(1, LARGEST + 1))


def test_batch_policy_holds_with_in_process_workers():
    with forked.ranks(in_a_resident_world, [0, 1, 2], 3) as answers:
        check(answers, [3])


def test_batch_policy_holds_with_sharded_parameters():
    with forked.ranks(in_a_sharded_world, [0, 1, 2], 3) as answers:
        check(answers, [3])
