"""The coordinator's hooks, and who says that the training is done."""

import os
import signal
import threading
import time

import pytest

from tests.unit.training.fake_agent import (
    STEPS,
    Coordinator,
    Steps,
    again,
    begin,
    finish,
    once,
    one_error,
    one_world,
    wait_until_aborted,
)
from torchelastic import SimpleWorkerStats, faults
from torchelastic.errors import ConfigError
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


# --- faults ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_plan():
    yield
    faults.plan("")
    faults.position(rank=-1, step=-1, generation=-1)


def struck(place, **position):
    """Whether a `raise` strikes when the place is passed once."""
    faults.position(**{"rank": 0, "step": 0, "generation": 0, **position})
    try:
        faults.at(place)
    except faults.FaultInjected:
        return True
    return False


def test_without_a_plan_nothing_happens():
    assert not any(struck(place) for place in faults.PLACES)


def test_reading_faults():
    first = faults.Fault(kind="stop", place="step.end", rank=0, step=5, generation=2, n=3)
    second = faults.Fault(kind="sleep", place="sync.end", generation=None, seconds=0.5)
    third = faults.Fault(kind="kill", place="step.begin")
    text = (
        "stop@rank=0,step=5,place=step.end,generation=2,n=3;"
        " sleep=0.5 @ place=sync.end , generation=any ;kill@place=step.begin;"
    )
    assert faults.parse(text) == (first, second, third)


def test_unknown_fault_is_named():
    for text, named in (
        ("burn@place=step.end", "burn"),
        ("kill@place=nowhere", "nowhere"),
        ("kill@place=step.end,color=red", "color"),
        ("kill@rank=1", "place"),
        ("kill@place=step.end,rank=one", "one"),
        ("sleep=long@place=step.end", "long"),
        ("kill", "place"),
    ):
        with pytest.raises(ConfigError, match=named):
            faults.parse(text)


def test_every_condition_must_hold():
    faults.plan("raise@rank=1,step=3,place=step.begin")
    assert struck("step.begin", rank=1, step=3)
    assert not struck("step.begin", rank=0, step=3)
    assert not struck("step.begin", rank=1, step=4)
    assert not struck("step.end", rank=1, step=3)


def test_a_thread_that_is_a_step_behind_passes_places_of_its_own_step():
    faults.plan("raise@place=snapshot.sealing,step=3,n=2;raise@place=snapshot.copy,step=4")
    faults.position(rank=0, step=3, generation=0)
    faults.at("snapshot.sealing", step=3)
    faults.position(rank=0, step=4, generation=0)
    faults.at("snapshot.copy", step=3)
    with pytest.raises(faults.FaultInjected, match=r"snapshot.sealing of rank 0, step 3"):
        faults.at("snapshot.sealing", step=3)
    with pytest.raises(faults.FaultInjected, match=r"snapshot.copy of rank 0, step 4"):
        faults.at("snapshot.copy", step=4)


def test_a_replacement_does_not_die_of_what_killed_the_first():
    faults.plan("raise@rank=1,step=3,place=step.begin")
    assert not struck("step.begin", rank=1, step=3, generation=1)
    faults.plan("raise@rank=1,step=3,place=step.begin,generation=any")
    assert struck("step.begin", rank=1, step=3, generation=1)


def test_the_second_time_a_place_is_passed_in_a_step():
    faults.plan("raise@place=collective.before,n=2")
    assert not struck("collective.before", step=7)
    with pytest.raises(faults.FaultInjected, match=r"collective.before of rank 0, step 7"):
        faults.at("collective.before")
    faults.at("collective.before")
    assert not struck("collective.before", step=8)


def test_the_plan_comes_from_the_environment_if_it_has_one(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "raise@place=sync.end")
    faults.load()
    assert struck("sync.end")
    monkeypatch.delenv(faults.VARIABLE)
    faults.plan("raise@place=sync.begin")
    faults.load()
    assert struck("sync.begin")


def end_of_child(plan, flags=0):
    """How a forked child that passes `step.begin` under the plan ends, or stops."""
    faults.plan(plan)
    child = os.fork()
    if child == 0:
        faults.position(rank=0, step=0, generation=0)
        faults.at("step.begin")
        os._exit(7)
    _, status = os.waitpid(child, flags)
    return child, status


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_the_process_ends(kind, code):
    _, status = end_of_child(f"{kind}@place=step.begin")
    assert os.waitstatus_to_exitcode(status) == code


def test_stop_and_go_on():
    child, status = end_of_child("stop@place=step.begin", os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_sleep():
    faults.plan("sleep=0.02@place=step.begin")
    began = time.monotonic()
    assert not struck("step.begin")
    assert time.monotonic() - began >= 0.02
