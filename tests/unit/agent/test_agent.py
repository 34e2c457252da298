"""What the agent does about its workers where no process is needed to see it."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.agent import Agent
from torchelastic.config import Entry, LaunchConfig


class Workers:
    """Notes what it is asked to do."""

    def __init__(self):
        self.started, self.stopping = [], False

    async def start_standby(self, local_rank, world):
        self.started.append(local_rank)


def agent_with(workers, state):
    made = Agent(LaunchConfig(), Entry("script", "train.py"))
    made._workers, made._state = workers, state
    return made


@pytest.mark.parametrize(
    ("closing", "stopping", "started"),
    [(False, False, [1]), (True, False, []), (False, True, [])],
    ids=["in time", "the agent closes", "the workers are stopped"],
)
@in_loop
async def test_no_worker_is_started_that_nobody_would_stop(closing, stopping, started):
    workers = Workers()
    made = agent_with(workers, SimpleNamespace(world=object()))
    made._closing, workers.stopping = closing, stopping
    await made._start_standby(1)
    if made._action is not None:
        await made._action
    assert workers.started == started


@pytest.mark.parametrize(
    ("progress", "first", "counted", "trained"),
    [
        (None, -1, -1, -1),
        ((4, 7, 0.0), 7, -1, -1),
        ((4, 8, 0.0), 7, -1, 4),
        ((3, 8, 0.0), 7, 4, 4),
        (None, -1, 4, 4),
    ],
    ids=["nothing is told", "in its first step", "past it", "an older slate", "by its optimizer"],
)
def test_a_generation_has_trained_once_a_worker_is_past_its_first_step(
    progress, first, counted, trained
):
    workers = SimpleNamespace(
        progress=lambda local_rank: progress,
        first_step=lambda local_rank: first,
        counted=SimpleNamespace(newest=counted),
    )
    made = agent_with(workers, None)
    assert made._newest_trained() == trained
    workers.progress, workers.counted.newest = lambda local_rank: None, -1
    assert made._newest_trained() == trained, "it is remembered"


@pytest.mark.parametrize(
    ("progress", "inherited", "kept", "held"),
    [
        (None, None, -1, -1),
        ((4, 7, 1.0), (-1, -1, 0.0), -1, 4),
        ((4, 7, 1.0), (4, 7, 1.0), -1, -1),
        ((5, 7, 2.0), (4, 7, 1.0), -1, 5),
        (None, None, 3, 3),
    ],
    ids=["nothing", "its own", "of the worker before", "its own by now", "kept by the agent"],
)
def test_the_state_of_a_generation_is_held_by_who_has_entered_a_step_of_it(
    progress, inherited, kept, held
):
    workers = SimpleNamespace(
        alive=(0,), progress=lambda local_rank: progress, inherited={0: inherited}
    )
    made = agent_with(workers, None)
    made._kept = kept
    assert made._newest_held() == held


@in_loop
async def test_no_worker_is_started_before_the_preflight_check_has_succeeded():
    workers = Workers()
    made = agent_with(workers, SimpleNamespace(world=object()))
    made._fit.clear()
    starting = asyncio.create_task(made._start_standby(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert made._action is None
    made._fit.set()
    await starting
    await made._action
    assert workers.started == [1]
