"""The coordinator's hooks, and who says that the training is done."""

import threading

import pytest

from tests.unit.training.fake_agent import Coordinator
from tests.unit.training.loop_support import (
    STEPS,
    Steps,
    again,
    begin,
    finish,
    once,
    one_error,
    one_world,
    wait_until_aborted,
)
from torchelastic import SimpleWorkerStats
from torchelastic.p2p import CoordinatorP2P
from torchelastic.worker.orders import Ask, Entered, Erred, Ping, Pong, Stopped


@pytest.fixture
def made():
    """The coordinators of a test."""
    return []


@pytest.fixture
def run(run, made):
    """As `run`, with a coordinator of this class, which the steps find in `made`."""

    def with_coordinator(script, steps, kind=Coordinator):
        def coordinator(end):
            made.append(kind(end))
            return made[0]

        return run(script, steps, coordinator=coordinator)

    return with_coordinator


class Hooked(Coordinator):
    def __init__(self, end):
        super().__init__(end)
        self.calls = []

    def on_error(self, e):
        self.calls.append(f"error {e}")

    def monitor_progress(self, state, worker_stats):
        self.calls.append(f"monitor {state.count}")

    def report_progress(self, state):
        self.calls.append(f"report {state.count}")

    def should_save_checkpoint(self):
        self.calls.append("save?")
        return False

    def should_stop_training(self):
        return len(self.calls) > 8


def test_hooks_of_the_user_are_called(run, made):
    run(one_error(1, end=3), Steps(end=100, _1=once(ValueError("odd"))), Hooked)
    one, two, three = ([f"monitor {n}", "save?", f"report {n}"] for n in (1, 2, 3))
    assert made[0].calls == [*one, "error odd", *two, *three]


def test_a_coordinator_that_asks_for_another_world_gets_it_and_no_step_is_taken_twice(run, made):
    class Asking(Hooked):
        def should_rendezvous(self, state):
            return state.count == 2

        def should_stop_training(self):
            return False

    def script(agent):
        begin(agent)
        erred = agent.hear(Erred)
        assert (erred.generation, erred.step, erred.retry) == (0, 2, True)
        assert erred.message.endswith("should_rendezvous asked for a new world at step 2.")
        again(agent, 2)

    steps = Steps()
    assert run(script, steps, Asking).count == STEPS
    assert steps.taken == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert not [call for call in made[0].calls if call.startswith("error")], "it is no failure"


def test_a_training_that_is_done_when_its_world_ends_takes_no_step_in_the_next(run, made):
    reached = threading.Event()

    class Waiting(Coordinator):
        def report_progress(self, state):
            if state.count == 3:
                reached.set()
                wait_until_aborted()

    def script(agent):
        begin(agent)
        assert reached.wait(30)
        again(agent, 3, end=3)

    steps = Steps(end=100, _2=lambda: made[0].signal_training_done())
    assert run(script, steps, Waiting).count == 3
    assert steps.taken == [(0, 0), (0, 1), (0, 2)]


def test_a_training_that_is_done_where_another_world_begins_finishes_there(run, made):
    reached, go_on = threading.Event(), threading.Event()

    def last_step():
        made[0].signal_training_done()
        reached.set()
        assert go_on.wait(30)

    def script(agent):
        begin(agent)
        assert reached.wait(30)
        agent.say(Ask(0))
        assert agent.hear(Entered) == Entered(0, 2)
        agent.enter(1, after=2)
        agent.say(Ping())  # answered after the order before it was taken
        agent.hear(Pong)
        go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 3)
        assert agent.up() == (1, 3)
        finish(agent, 1, 3)

    assert run(script, Steps(end=100, _2=last_step)).count == 3


def test_a_last_step_that_fails_is_taken_again(run, made):
    fail = once(ValueError())

    def act():
        made[0].signal_training_done()
        fail()

    assert run(one_error(2, end=3), Steps(end=100, _2=act)).count == 3


def test_slow_workers_are_noticed(run, made, monkeypatch):
    monkeypatch.setattr("torchelastic.p2p.CoordinatorP2P.MONITOR_PROGRESS_FREQ", 2)
    monkeypatch.setattr("torchelastic.training.coordinator._gather", lambda rate: [rate, 2 * rate])
    seen = []

    def step(state):
        seen.append(made[0].is_worker_straggler)
        if state.count == 3:
            raise StopIteration
        state.count += 1
        return state, SimpleWorkerStats(5.0)

    run(one_world(3), step)
    assert seen == [False, False, True, True]
    assert made[0].last_relative_prog_rate == 0.5


def test_an_overridden_method_that_is_never_called_is_named_at_once(caplog):
    class Own(CoordinatorP2P):
        def rendezvous_barrier(self):
            return super().rendezvous_barrier()

        def on_error(self, e):
            """A hook, which is called."""

    Own(init_method="tcp://nowhere/test?min_workers=1")
    (said,) = caplog.messages
    assert said == (
        "torchelastic.train ignores Own.rendezvous_barrier: the agent runs the rendezvous. Move "
        "the code to State.sync."
    )
    CoordinatorP2P(init_method="tcp://nowhere/test?min_workers=1")
    assert len(caplog.messages) == 1
