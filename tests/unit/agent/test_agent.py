"""What the agent does about its workers where no process is needed to see it."""

import asyncio
import gc
import warnings
from types import SimpleNamespace

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.agent import Agent
from torchelastic.config import Entry, LaunchConfig
from torchelastic.side_tasks import SideTasks


class Workers:
    """Notes what it is asked to do."""

    def __init__(self):
        self.started, self.stopping = [], False

    async def start_standby(self, local_rank, world, place):
        self.started.append(local_rank)
        return True


def agent_with(workers, state):
    made = Agent(LaunchConfig(), Entry("script", "train.py"))
    made.workers, made.machine.state = workers, state
    made.tasks = SideTasks(made.queue.put_nowait)
    return made


@pytest.mark.parametrize(
    ("closing", "stopping", "started"),
    [(False, False, [1]), (True, False, []), (False, True, [])],
    ids=["in time", "the agent closes", "the workers are stopped"],
)
@in_loop
async def test_no_worker_is_started_that_nobody_would_stop(closing, stopping, started):
    workers = Workers()
    made = agent_with(workers, SimpleNamespace(world=object(), place=0))
    made._closing, workers.stopping = closing, stopping
    await made._start_standby(1)
    if made._action is not None:
        await made._action
    assert workers.started == started


@in_loop
async def test_no_worker_is_started_before_the_preflight_check_has_succeeded():
    workers = Workers()
    made = agent_with(workers, SimpleNamespace(world=object(), place=0))
    made._fit.clear()
    starting = asyncio.create_task(made._start_standby(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert made._action is None
    made._fit.set()
    await starting
    await made._action
    assert workers.started == [1]


@in_loop
async def test_action_cancelled_before_its_turn_leaves_no_coroutine_behind():
    """An agent that is closed while one action waits for another."""
    made = agent_with(Workers(), SimpleNamespace(world=object(), place=0))
    made._act(asyncio.Event().wait)
    made._act(made._stop_workers)
    await asyncio.sleep(0)
    with warnings.catch_warnings(record=True) as warned:
        await made.tasks.cancel()
        gc.collect()
    assert warned == []
