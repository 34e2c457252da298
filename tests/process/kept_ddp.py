"""One rank of a run whose worlds are given: who dies when, who comes anew."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.process.forked import build, when_lost
from torchelastic.training.group import ddp as kept


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
