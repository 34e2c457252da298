"""Fakes for tests of `train`: an agent that does what a test says, a store, a state, and steps."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tests.support import poll_for
from torchelastic import State
from torchelastic.training import coordinator as coordinators
from torchelastic.training import session
from torchelastic.worker import channel, orders
from torchelastic.worker.orders import Erred, Finished, Over, Stopped


class FakeAgent:
    """Gives orders and hears reports; every wait has a deadline."""

    def __init__(self, end: socket.socket, store_port: int) -> None:
        self.end = end
        self._store_port = store_port
        self.heard: list[orders.Report] = []
        self.begun: list[orders.Begins] = []

    def say(self, order: orders.Order, descriptor: int | None = None) -> None:
        data = [json.dumps(orders.to_json(order)).encode()]
        socket.send_fds(self.end, data, [descriptor] if descriptor is not None else [])

    def enter(self, generation: int, *, rank: int = 0, size: int = 1, after: Any = None) -> None:
        self.say(
            orders.Enter(
                generation=generation,
                rank=rank,
                size=size,
                store=f"127.0.0.1:{self._store_port}",
                local_rank=rank,
                local_size=size,
                node_rank=0,
                nodes=1,
                after=after,
            )
        )

    def hear(self, kind: type, timeout: float = 30.0) -> Any:
        """The next report, which must be of this kind; where it begins is noted beside."""
        readable, _, _ = select.select([self.end], [], [], timeout)
        assert readable, f"no {kind.__name__} within {timeout} s after {self.heard}"
        data = self.end.recv(channel.LIMIT)
        assert data, f"the worker has closed its end, after {self.heard}"
        report = orders.from_json(json.loads(data))
        if isinstance(report, orders.Begins):
            self.begun.append(report)
            return self.hear(kind, timeout)
        self.heard.append(report)
        assert type(report) is kind, f"{kind.__name__} expected: {self.heard}"
        return report

    def up(self) -> tuple[int, int]:
        """The worker trains: in which generation, and after how many steps."""
        report = self.hear(orders.Up)
        assert report.built > 0
        assert report.fetched > 0
        return report.generation, report.step


@contextmanager
def store() -> Iterator[int]:
    """A store's port."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield host.port
    del host


class Coordinator(coordinators.CoordinatorP2P):
    """A coordinator whose agent is the test."""

    def __init__(self, end: socket.socket, **arguments: Any) -> None:
        self._end = end
        super().__init__(init_method="tcp://nowhere/test?min_workers=1", **arguments)

    def open(self) -> channel.WorkerLink:
        return channel.WorkerLink(self._end)


# --- a state and steps, and the part of an agent that follows a script ----------------------------


STEPS = 6


class Counting(State):
    """Counts its steps; what was done is written down where no rollback reaches it."""

    def __init__(self):
        self.count = 0
        self.synced = []

    def sync(self):
        world = session.current()
        self.synced.append((world.generation, self.count, world.versions))

    def snapshot(self):
        return self.count

    def apply(self, snapshot):
        self.count = snapshot


class Steps:
    """A train_step that adds one, writes down what it did, and does as told at given steps."""

    def __init__(self, end=STEPS, **at):
        self.end, self.at, self.taken = end, {int(k[1:]): v for k, v in at.items()}, []

    def __call__(self, state):
        step = state.count
        if step == self.end:
            raise StopIteration
        state.count += 1
        self.taken.append((session.current().generation, step))
        if step in self.at:
            self.at[step]()


def once(error):
    """Raise it the first time only."""
    errors = [error]

    def act():
        if errors:
            raise errors.pop()

    return act


def begin(agent, generation=0, step=0):
    """Let the worker enter a world, in which it trains after this many steps."""
    agent.enter(generation)
    assert agent.up() == (generation, step)


def finish(agent, generation=0, step=STEPS):
    """Hear of the end of the data, and end the training."""
    assert agent.hear(Finished) == Finished(generation, step)
    agent.say(Over(generation, "the training is done", finished=True))
    assert agent.hear(Stopped) == Stopped(generation, step)


def over(agent, generation, step, reason="a failure"):
    agent.say(Over(generation, reason))
    assert agent.hear(Stopped) == Stopped(generation, step)


def again(agent, step, end=STEPS):
    """End the first world; the second begins with this step and trains to the end."""
    over(agent, 0, step)
    begin(agent, 1, step)
    finish(agent, 1, end)


def one_world(end=STEPS, generation=0):
    """The script of a training that nothing disturbs."""

    def script(agent):
        begin(agent, generation)
        finish(agent, generation, end)

    return script


def one_error(step, end=STEPS):
    """The script of a training whose first world ends with an error that rolls back to `step`."""

    def script(agent):
        begin(agent)
        assert agent.hear(Erred).step == step
        again(agent, step, end)

    return script


def up_then_error(agent):
    begin(agent)
    return agent.hear(Erred)


def wait_until_aborted():
    group = session.current().group
    poll_for(lambda: group.aborted, what="the abort")
