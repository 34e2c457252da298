"""The loop, in worlds of one worker, with an agent that does what the test says."""

import math
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.support import poll_for
from tests.unit.training.fake_agent import Coordinator, FakeAgent, store
from torchelastic import SimpleWorkerStats, State, checkpoint, env, faults, train_loop
from torchelastic.errors import ChannelLost, ConfigError, JobClosed, NonRetryableException
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import coordinator as coordinators
from torchelastic.training import session
from torchelastic.training.group import Group
from torchelastic.training.state import Torn
from torchelastic.worker import channel, slate
from torchelastic.worker.orders import (
    Ask,
    Closed,
    Enlisted,
    Entered,
    Erred,
    Finished,
    Leave,
    Over,
    PeerLost,
    Ping,
    Pong,
    Slate,
    Stopped,
    Through,
    Up,
)

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


@pytest.fixture
def run(monkeypatch):
    """Run `train` against an agent that follows a script in a thread."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def run(script, train_step, state=None, coordinator=Coordinator, how=train_loop.train, **more):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with store() as port, ours:
            agent = FakeAgent(ours, port)
            failures = []

            def follow():
                try:
                    agent.hear(Enlisted)
                    script(agent)
                except BaseException as error:
                    failures.append(error)
                    ours.shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=follow)
            thread.start()
            try:
                return how(coordinator(theirs), train_step, state or Counting(), **more)
            finally:
                thread.join()
                if failures:
                    raise failures[0]

    return run


def finish(agent, generation, step=STEPS):
    """Hear of the end of the data, and end the training."""
    assert agent.hear(Finished) == Finished(generation, step)
    agent.say(Over(generation, "the training is done", finished=True))
    assert agent.hear(Stopped) == Stopped(generation, step)


def over(agent, generation, step, reason="a failure"):
    agent.say(Over(generation, reason))
    assert agent.hear(Stopped) == Stopped(generation, step)


def test_to_the_end(run):
    def script(agent):
        agent.enter(0)
        assert agent.hear(Up) == Up(0, 0)
        finish(agent, 0)

    steps = Steps()
    state = run(script, steps)
    assert state.count == STEPS
    assert state.synced == [(0, 0, ((-1, 0),))]
    assert steps.taken == [(0, step) for step in range(STEPS)]
    assert not dist.is_initialized()


def test_an_error_is_reported_rolled_back_and_the_step_taken_again(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        erred = agent.hear(Erred)
        assert (erred.step, erred.message, erred.retry) == (3, "ValueError: bad batch", True)
        assert "in act" in erred.traceback
        over(agent, 0, 3)
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 3)
        finish(agent, 1)

    steps = Steps(_3=once(ValueError("bad batch")))
    state = run(script, steps)
    assert state.count == STEPS
    assert state.synced == [(0, 0, ((-1, 0),)), (1, 3, ((0, 3),))]
    assert steps.taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (1, 5)]


def test_nothing_is_entered_before_the_broken_world_is_over(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        agent.enter(1, after=9)
        over(agent, 1, 3)
        agent.enter(2)
        agent.hear(Up)
        finish(agent, 2)

    assert run(script, Steps(_3=once(ValueError()))).count == STEPS


def test_what_cannot_be_retried_is_raised(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert not agent.hear(Erred).retry

    with pytest.raises(NonRetryableException, match="no such file"):
        run(script, Steps(_2=once(NonRetryableException("no such file"))))
    assert not dist.is_initialized()


def test_a_group_that_cannot_be_left_hides_no_error(run, monkeypatch, caplog):
    leave = Group.leave
    monkeypatch.setattr(Group, "leave", lambda group: leave(group) and False)

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)

    with pytest.raises(NonRetryableException, match="no such file"):
        run(script, Steps(_2=once(NonRetryableException("no such file"))))
    assert "may still write" in caplog.text
    assert not [one for one in threading.enumerate() if "control" in one.name]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_the_end_of_the_process_is_not_held_up(run, error):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)

    with pytest.raises(type(error)):
        run(script, Steps(_2=once(error)))


def test_failures_are_counted_until_a_step_is_further_than_ever(run):
    def fail():
        raise ValueError("always")

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        for generation in range(2):
            assert agent.hear(Erred).retry
            over(agent, generation, 4)
            agent.enter(generation + 1)
            agent.hear(Up)
        assert not agent.hear(Erred).retry

    steps = Steps(_4=fail)
    with pytest.raises(RuntimeError, match=r"failed 3 times .* beyond step 4") as raised:
        run(script, steps, max_failures=2)
    assert "always" in str(raised.value.__cause__)


def test_failures_at_different_steps_are_not_added_up(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        for generation, step in enumerate((1, 3, 5)):
            assert agent.hear(Erred).retry
            over(agent, generation, step)
            agent.enter(generation + 1)
            agent.hear(Up)
        finish(agent, 3)

    errors = {f"_{step}": once(ValueError()) for step in (1, 3, 5)}
    assert run(script, Steps(**errors), max_failures=1).count == STEPS


def test_the_limit_of_release_01(run, monkeypatch):
    monkeypatch.setattr(train_loop, "MAX_FAILURES", 0)

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert not agent.hear(Erred).retry

    with pytest.raises(RuntimeError, match="max_failures is 0"):
        run(script, Steps(_1=once(ValueError())))


def wait_until_aborted():
    group = session.current().group
    poll_for(lambda: group.aborted, what="the abort")


def in_a_collective_when_the_world_ends(world_over):
    def act():
        if session.current().generation == 0:
            world_over.set()
            wait_until_aborted()
            dist.all_reduce(torch.zeros(1))

    return act


def test_the_end_of_a_world_in_a_step(run):
    reached = threading.Event()

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        over(agent, 0, 2, "node b is lost")
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 2)
        finish(agent, 1)

    steps = Steps(_2=in_a_collective_when_the_world_ends(reached))
    assert run(script, steps).count == STEPS


def test_an_error_after_the_end_of_the_world_is_none_of_user_code(run):
    reached = threading.Event()

    def act():
        if session.current().generation == 0:
            reached.set()
            wait_until_aborted()
            raise KeyError("what the end of the world has led to")

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        over(agent, 0, 2)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    assert run(script, Steps(_2=act), max_failures=0).count == STEPS


def test_a_world_that_is_over_without_a_collective_is_noticed_at_the_boundary(run):
    steps = Steps(end=10**9)

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.say(Over(0, "", finished=True))
        agent.hear(Stopped)

    state = run(script, steps)
    assert state.count == len(steps.taken)


def test_a_lost_peer_is_a_hint(run):
    from torchelastic.training.group import PeerLostError

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        lost = agent.hear(PeerLost)
        assert (lost.step, lost.message) == (1, "PeerLostError: connection reset")
        over(agent, 0, 1)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    assert run(script, Steps(_1=once(PeerLostError("connection reset")))).count == STEPS


def test_a_store_out_of_reach_is_a_lost_peer(run):
    def script(agent):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        agent._store_port, kept = port, agent._store_port
        agent.enter(0)
        assert agent.hear(PeerLost).step == 0
        over(agent, 0, 0)
        agent._store_port = kept
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    def coordinator(end):
        return Coordinator(end, process_group_timeout=1000)

    assert run(script, Steps(), coordinator=coordinator).count == STEPS


# --- step boundaries -----------------------------------------------------------------------------


def held_at(step, reached, go_on):
    """A step that lasts until the test lets it go on."""

    def act():
        if session.current().generation == 0:
            reached.set()
            assert go_on.wait(30)

    return {f"_{step}": act}


def test_to_the_next_world_at_a_boundary(run):
    reached, go_on = threading.Event(), threading.Event()

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        agent.say(Ask(0))
        assert agent.hear(Entered) == Entered(0, 2)
        agent.enter(1, after=3)
        agent.say(Ping())  # answered after the order before it was taken
        agent.hear(Pong)
        go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 4)
        assert agent.hear(Up) == Up(1, 4)
        finish(agent, 1)

    steps = Steps(**held_at(2, reached, go_on))
    state = run(script, steps)
    assert steps.taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    assert state.synced[1] == (1, 4, ((0, 4),))


def test_stop_at_a_boundary_and_leave(run):
    reached, go_on = threading.Event(), threading.Event()

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        agent.say(Ask(0))
        agent.hear(Entered)
        agent.say(Through(0, 2))
        go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 3)
        agent.say(Leave(15))

    steps = Steps(**held_at(2, reached, go_on))
    with pytest.raises(SystemExit) as ended:
        run(script, steps)
    assert ended.value.code == 143
    assert steps.taken[-1] == (0, 2)


def test_at_the_end_of_the_data_elsewhere_the_last_step_is_run_to_its_end(run):
    reached, go_on = threading.Event(), threading.Event()

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert reached.wait(30)
        agent.say(Over(0, "done", finished=True, through=2))
        agent.say(Ping())
        assert not agent.hear(Pong).aborted
        go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 3)

    assert run(script, Steps(**held_at(2, reached, go_on))).count == 3


# --- snapshots, checkpoints ----------------------------------------------------------------------


def test_snapshots_may_be_taken_less_often(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert agent.hear(Erred).step == 3
        over(agent, 0, 3)
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 3)
        finish(agent, 1)

    steps = Steps(_5=once(ValueError()))
    state = run(script, steps, snapshot_every=3)
    assert state.synced[1] == (1, 3, ((0, 3),))
    assert [step for generation, step in steps.taken if generation == 1] == [3, 4, 5]


def test_a_torch_state_takes_its_snapshot_at_every_step(run):
    def step(state):
        if state.step == STEPS:
            raise StopIteration
        state.model(torch.ones(1)).backward()
        state.optimizer.step()
        if state.step == 5 and session.current().generation == 0:
            raise ValueError

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert agent.hear(Erred).step == 5
        over(agent, 0, 5)
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 5)
        finish(agent, 1)

    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.TorchState(model=model, optimizer=sgd, copy_before_write=True)
    assert run(script, step, state, snapshot_every=3).step == STEPS


def test_without_snapshots_nothing_is_rolled_back(run):
    class NoRollback(Counting):
        snapshot, apply = State.snapshot, State.apply

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert agent.hear(Erred).step == 2
        over(agent, 0, 2)
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 2)
        agent.hear(Finished)
        agent.say(Over(1, "", finished=True))
        agent.hear(Stopped)

    state = run(script, Steps(_2=once(ValueError())), NoRollback())
    assert state.synced[1] == (1, 3, ((0, 2),))


def test_a_state_that_nobody_can_roll_back_ends_the_job(run):
    class Fragile(Counting):
        def apply(self, snapshot):
            raise Torn("the optimizer was in the middle")

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        over(agent, 0, -1)
        agent.enter(1)
        assert not agent.hear(Erred).retry

    with pytest.raises(NonRetryableException, match="No worker holds a whole state"):
        run(script, Steps(_2=once(ValueError())), Fragile())


@pytest.fixture
def manager(tmp_path):
    made = checkpoint.FileSystemCheckpointManager(str(tmp_path))
    checkpoint.set_checkpoint_manager(made)
    yield made
    checkpoint.set_checkpoint_manager(None)


def test_checkpoints_are_written_and_loaded_where_nobody_has_more(run, manager):
    def first(agent):
        agent.enter(0)
        agent.hear(Up)
        finish(agent, 0, 5)

    run(first, Steps(end=5), checkpoint_every=2)

    def second(agent):
        agent.enter(0)
        assert agent.hear(Up) == Up(0, 4)
        agent.hear(Erred)
        over(agent, 0, 5)
        agent.enter(1)
        assert agent.hear(Up) == Up(1, 5), "memory is fresher than the checkpoint"
        finish(agent, 1)

    state = run(second, Steps(_5=once(ValueError())))
    assert state.synced == [(0, 4, ((-1, 4),)), (1, 5, ((0, 5),))]


@pytest.mark.parametrize("error", [NonRetryableException("no such file"), SystemExit(3)])
def test_a_checkpoint_in_flight_is_not_lost_to_an_error(run, manager, monkeypatch, error):
    waited_for = threading.Event()
    create, wait = manager.create_checkpoint, checkpoint.finish

    def create_when_waited_for():
        assert waited_for.wait(30)
        return create()

    def finish():
        waited_for.set()
        wait()

    monkeypatch.setattr(manager, "create_checkpoint", create_when_waited_for)
    monkeypatch.setattr(checkpoint, "finish", finish)

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        if isinstance(error, Exception):
            agent.hear(Erred)

    try:
        with pytest.raises(type(error)):
            run(script, Steps(_2=once(error)), checkpoint_every=2)
        assert len(manager.list_checkpoints()) == 1
    finally:
        finish()


def test_a_state_says_when_a_checkpoint_is_due(run, manager):
    class Asking(Counting):
        def should_save_checkpoint(self, rank):
            return self.count == 3

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        finish(agent, 0)

    run(script, Steps(), Asking())
    assert len(manager.list_checkpoints()) == 1


# --- what a step may be --------------------------------------------------------------------------


def script_of_one_world(agent):
    agent.enter(0)
    agent.hear(Up)
    agent.hear(Finished)
    agent.say(Over(0, "", finished=True))
    agent.hear(Stopped)


def test_a_step_may_return_another_state(run):
    def step(state):
        if state.count == 3:
            raise StopIteration
        other = Counting()
        other.count = state.count + 1
        return other, SimpleWorkerStats(1.0)

    first = Counting()
    assert run(script_of_one_world, step, first).count == 3
    assert first.count == 0


def test_a_generator_is_made_anew_in_every_world(run):
    made = []

    def steps(state):
        made.append(session.current().generation)
        act = Steps(_2=fail)
        while state.count < STEPS:
            act(state)
            yield

    fail = once(ValueError())

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        over(agent, 0, 2)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    assert run(script, steps, how=torchelastic.run_train).count == STEPS
    assert made == [0, 1]


def test_the_end_of_the_data_inside_a_generator(run):
    """Python makes a RuntimeError of it; 0.1 tried such a job again a hundred times."""

    def steps(state):
        data = iter(range(4))
        while True:
            next(data)
            state.count += 1
            yield state, SimpleWorkerStats(None)

    assert run(script_of_one_world, steps, how=torchelastic.run_train).count == 4


# --- the coordinator's hooks ---------------------------------------------------------------------


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
        assert agent.hear(Up) == Up(1, 3)
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


# --- what is around it ---------------------------------------------------------------------------


def test_the_world_is_seen_by_the_script(run):
    seen = []

    def look():
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
        seen.append([env.get(name) for name in names])

    def script(agent):
        agent.enter(7)
        agent.hear(Up)
        finish(agent, 7, 1)

    run(script, Steps(end=1, _0=look))
    assert seen == [["0", "1", "127.0.0.1", "7"]]


def test_progress_is_written_to_the_slate(run):
    descriptor = slate.create()

    def script(agent):
        agent.say(Slate(), descriptor)
        agent.enter(4)
        agent.hear(Up)
        finish(agent, 4)

    run(script, Steps())
    assert slate.read_progress(descriptor) == (4, STEPS, math.inf)
    os.close(descriptor)


def test_faults_strike_at_their_step(run):
    faults.plan("raise@step=3,place=step.end")

    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        assert agent.hear(Erred).step == 3
        over(agent, 0, 3)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    try:
        assert run(script, Steps()).count == STEPS
    finally:
        faults.plan("")


def test_a_sync_that_fails_is_rolled_back(run):
    class Failing(Counting):
        fail = once(ValueError("in sync"))

        def sync(self):
            super().sync()
            self.count = 99
            Failing.fail()
            self.count = 0

    def script(agent):
        agent.enter(0)
        assert agent.hear(Erred).step == 0
        over(agent, 0, 0)
        agent.enter(1)
        agent.hear(Up)
        finish(agent, 1)

    state = run(script, Steps(), Failing())
    assert [count for _, count, _ in state.synced] == [0, 0]


def test_an_agent_that_is_gone_ends_the_training_with_what_was_wrong(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        agent.end.close()

    with pytest.raises(ChannelLost) as raised:
        run(script, Steps(_1=once(ValueError("the last error"))))
    assert str(raised.value.__cause__) == "the last error"


def test_a_job_that_has_ended_otherwise_is_an_error(run):
    def script(agent):
        agent.enter(0)
        agent.hear(Up)
        agent.hear(Erred)
        agent.say(Closed("The job has ended: the same error came twice at step 1."))

    with pytest.raises(JobClosed, match="twice at step 1"):
        run(script, Steps(_1=once(ValueError())))


def test_a_step_costs_little(run):
    """CPU time of the training thread for what is not the user's, with a slate."""
    descriptor, count, spent = slate.create(), 20_000, []

    def step(state):
        if state.count == 0:
            spent.append(time.thread_time())
        if state.count == count:
            spent.append(time.thread_time())
            raise StopIteration
        state.count += 1

    def script(agent):
        agent.say(Slate(), descriptor)
        script_of_one_world(agent)

    run(script, step)
    os.close(descriptor)
    assert (spent[1] - spent[0]) / count < 20e-6


# --- wrong input ---------------------------------------------------------------------------------


def test_what_train_is_given():
    with pytest.raises(TypeError, match="CoordinatorP2P"):
        torchelastic.train(object(), Steps(), Counting())
    coordinator = CoordinatorP2P(init_method="tcp://nowhere/x?min_workers=1")
    with pytest.raises(TypeError, match=r"torchelastic\.State"):
        torchelastic.train(coordinator, Steps(), object())
    for wrong in ({"snapshot_every": 0}, {"checkpoint_every": 0}, {"max_failures": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            torchelastic.train(coordinator, Steps(), Counting(), **wrong)


def test_what_a_coordinator_is_given():
    with pytest.raises(ConfigError, match="torchelastic run"):
        CoordinatorP2P()
    for wrong in (
        {"process_group_timeout": 0},
        {"max_num_trainers": 0},
        {"process_group_timeout": 5000, "coordinator_pg_timeout": 4000},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            CoordinatorP2P(init_method="tcp://nowhere/x?min_workers=1", **wrong)


def test_an_agent_has_one_training(monkeypatch):
    monkeypatch.setattr(coordinators, "_enlisted", False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = [channel.Link(theirs)]
    monkeypatch.setattr(channel, "link", lambda: links[0])
    with ours:
        assert CoordinatorP2P().open() is links[0]
        with pytest.raises(ConfigError, match="call train once"):
            torchelastic.train(CoordinatorP2P(), Steps(), Counting())
        links[0].close()


def test_outside_of_a_world():
    coordinator = CoordinatorP2P(init_method="tcp://nowhere/x?min_workers=1")
    with pytest.raises(RuntimeError, match="in no world"):
        _ = coordinator.rank
    with pytest.raises(RuntimeError, match="in no world"):
        coordinator.rendezvous_barrier()
