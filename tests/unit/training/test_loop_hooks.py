"""The coordinator's hooks, and who says that the training is done."""

import threading

from tests.unit.training.fake_agent import Coordinator
from tests.unit.training.loop_support import (
    Steps,
    finish,
    once,
    over,
    script_of_one_world,
    wait_until_aborted,
)
from torchelastic import SimpleWorkerStats
from torchelastic.worker.orders import Erred, Up


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


def test_hooks_that_somebody_has_written_are_called(run):
    made = []

    def coordinator(end):
        made.append(Hooked(end))
        return made[0]

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        over(agent, 0, 1)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1, 3)

    steps = Steps(end=100, _1=once(ValueError("odd")))
    run(script, steps, coordinator=coordinator)
    one = ["monitor 1", "save?", "report 1"]
    two = ["monitor 2", "save?", "report 2"]
    three = ["monitor 3", "save?", "report 3"]
    assert made[0].calls == [*one, "error odd", *two, *three]


def test_the_training_is_done_when_the_coordinator_is_told_so(run):
    made = []

    def coordinator(end):
        made.append(Coordinator(end))
        return made[0]

    steps = Steps(end=100, _2=lambda: made[0].signal_training_done())

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        finish(agent, 0, 3)

    assert run(script, steps, coordinator=coordinator).count == 3


def test_a_training_that_is_done_when_its_world_ends_takes_no_step_in_the_next(run):
    made, reached = [], threading.Event()

    class Waiting(Coordinator):
        def report_progress(self, state):
            if state.count == 3:
                reached.set()
                wait_until_aborted()

    def coordinator(end):
        made.append(Waiting(end))
        return made[0]

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        over(agent, 0, 3)
        agent.enter(1)
        assert agent.up() == (1, 3)
        finish(agent, 1, 3)

    steps = Steps(end=100, _2=lambda: made[0].signal_training_done())
    assert run(script, steps, coordinator=coordinator).count == 3
    assert steps.taken == [(0, 0), (0, 1), (0, 2)]


def test_a_last_step_that_fails_is_taken_again(run):
    made = []
    fail = once(ValueError())

    def coordinator(end):
        made.append(Coordinator(end))
        return made[0]

    def act():
        made[0].signal_training_done()
        fail()

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        over(agent, 0, 2)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1, 3)

    assert run(script, Steps(end=100, _2=act), coordinator=coordinator).count == 3


def test_slow_workers_are_noticed(run, monkeypatch):
    monkeypatch.setattr("torchelastic.training.coordinator.MONITOR_PROGRESS_FREQ", 2)
    monkeypatch.setattr("torchelastic.training.coordinator._gather", lambda rate: [rate, 2 * rate])
    made, seen = [], []

    def coordinator(end):
        made.append(Coordinator(end))
        return made[0]

    def step(state):
        seen.append(made[0].is_worker_straggler)
        if state.count == 3:
            raise StopIteration
        state.count += 1
        return state, SimpleWorkerStats(5.0)

    run(script_of_one_world, step, coordinator=coordinator)
    assert seen == [False, False, True, True]
