"""What is known of workers without asking them: who is on its way into a world."""

import math
import os
import time
from types import SimpleNamespace

import pytest

from tests.unit.worker import entering
from torchelastic.agent import workers as module
from torchelastic.agent.sampling import Sampling
from torchelastic.agent.workers import Workers
from torchelastic.clock import FakeClock
from torchelastic.config import Entry, LaunchConfig
from torchelastic.worker import orders, slate
from torchelastic.worker.orders import Erred, Keeps, PeerLost, Stopped, Up


@pytest.fixture
def told():
    """Progress, as it is told."""
    return []


@pytest.fixture
def workers(monkeypatch, told):
    monkeypatch.setattr(module.Cgroup, "create", lambda: None)
    made = Workers(
        LaunchConfig(),
        Entry("script", "train.py"),
        {},
        nursery=SimpleNamespace(zygote=None, pids=set()),
        node_logs=None,
        narrator=SimpleNamespace(
            name="n", worker_failed=lambda failure: None, training=lambda rank, up: None
        ),
        clock=None,
        tell_event=lambda event: None,
        secret=None,
        snapshots=None,
        sampling=Sampling(lambda *progress: told.append(progress), FakeClock()),
    )
    made._slates[0] = slate.create()
    yield made
    os.close(made._slates[0])
    made._memory.close()


@pytest.fixture
def worker(workers):
    """What the worker writes to."""
    made = slate.Slate(workers._slates[0])
    yield made
    made.close()


def test_who_adds_a_helper_keeps_it_from_being_reaped(workers):
    workers.helpers.add(os.getpid())
    assert os.getpid() in workers._supervisor.exempt


def enter(workers, generation):
    workers.tell(0, entering.enter(generation))


def test_nobody_is_on_the_way_who_was_told_nothing(workers):
    assert workers.entering_since(0) is None


def test_on_the_way_from_the_order_to_the_first_step(workers, worker):
    before = time.monotonic()
    enter(workers, 0)
    assert before <= workers.entering_since(0) <= time.monotonic()
    worker.entered(0, 0)
    assert workers.entering_since(0) is None


def test_a_last_step_of_the_world_before_is_progress(workers, worker):
    enter(workers, 0)
    worker.entered(0, 0)
    enter(workers, 1)
    told = workers.entering_since(0)
    worker.entered(0, 1)
    assert workers.entering_since(0) > told
    worker.unhurried()  # it has left that world
    assert workers.entering_since(0) <= told


def test_an_unhurried_last_step_of_the_world_before_may_take_any_time(workers, worker):
    """The next world is known, and an evaluation goes on in this one: nobody hangs."""
    enter(workers, 0)
    workers._heard(0, orders.to_json(Up(0, 0)))
    worker.entered(0, 0)
    enter(workers, 1)
    told = workers.entering_since(0)
    worker.unhurried()
    assert workers.entering_since(0) == math.inf
    worker.hurried()
    assert told < workers.entering_since(0) < math.inf
    worker.unhurried()  # it has left that world, and says so: only now it sets out
    before = time.monotonic()
    workers._heard(0, orders.to_json(Stopped(0, 1)))
    assert before <= workers.entering_since(0) <= time.monotonic()


@pytest.mark.parametrize(
    ("report", "on_the_way"),
    [
        (Stopped(0, 3), True),
        (Stopped(1, 3), False),
        (PeerLost(1, 3, "gone"), False),
        (Erred(1, 3, "boom", "traceback"), False),
        (PeerLost(0, 3, "gone"), True),
    ],
)
def test_who_tells_that_it_does_not_go_there_is_not_on_the_way(workers, report, on_the_way):
    enter(workers, 1)
    workers._heard(0, orders.to_json(report))
    assert (workers.entering_since(0) is not None) is on_the_way


@pytest.mark.parametrize(
    "garbage",
    [
        {"type": "stopped", "generation": 1},
        {"type": "stopped", "generation": 1, "step": "three"},
        {"type": "up", "generation": None, "step": 3},
        {"type": ["stopped"], "generation": 1, "step": 3},
        {"type": "progress", "step": "three"},
        {},
    ],
    ids=str,
)
def test_a_workers_garbage_changes_nothing(workers, garbage):
    enter(workers, 1)
    workers._heard(0, garbage)
    assert workers.entering_since(0) is not None
    assert workers.best_step == -1


def test_a_replacement_is_on_no_way_before_it_is_told(workers):
    enter(workers, 1)
    workers._forget(0)
    assert workers.entering_since(0) is None


# --- how far they are ----------------------------------------------------------------------------


def test_when_a_worker_has_stopped_its_last_step_is_told(workers, worker, told):
    enter(workers, 0)
    worker.rank = 2
    worker.entered(0, 7)
    workers._heard(0, orders.to_json(Stopped(0, 8)))
    [(generation, progress)] = told
    assert (generation, progress.ranks, progress.steps) == (0, [2], [7])


def test_a_script_that_keeps_its_state_is_given_a_slate_and_shows_its_step(workers):
    given = []
    workers._supervisor.tell = lambda local_rank, message, fds: given.append((message, *fds))
    workers._places[1] = (4, 1)
    workers._heard(1, orders.to_json(Keeps()))
    [(message, descriptor)] = given
    assert message == orders.to_json(orders.Slate())
    assert workers.best_step == -1
    shown = slate.Slate(descriptor)
    shown.entered(3, 50)  # of a generation before: nothing of this one
    assert workers.best_step == -1
    shown.entered(4, 12)
    assert workers.best_step == 12
    shown.close()
    os.close(workers._slates.pop(1))
