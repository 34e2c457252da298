"""The loop, in worlds of one worker, with an agent that does what the test says."""

import math
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.unit.training.fake_agent import (
    STEPS,
    Coordinator,
    Counting,
    Steps,
    again,
    begin,
    finish,
    once,
    one_error,
    one_world,
    over,
    up_then_error,
    wait_until_aborted,
)
from torchelastic import SimpleWorkerStats, State, checkpoint, env, faults
from torchelastic.errors import (
    ChannelLost,
    ConfigError,
    JobClosed,
    NonRetryableException,
    OtherBitsError,
    StopException,
    UnfitError,
)
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import coordinator as coordinators
from torchelastic.training import session, stored_state, train
from torchelastic.training.group.group import GenerationOver, Group, PeerLostError
from torchelastic.training.outcome import (
    Action,
    AnotherWorld,
    Kind,
    Where,
    chain,
    decide,
    kind_of,
)
from torchelastic.training.state import Torn
from torchelastic.worker import channel, status_page
from torchelastic.worker.orders import (
    Ask,
    Begins,
    Closed,
    Entered,
    Erred,
    Finished,
    Leave,
    Over,
    PeerLost,
    Ping,
    Pong,
    StatusPage,
    Stopped,
    Through,
)


def test_to_the_end(run):
    steps = Steps()
    state = run(one_world(), steps)
    assert state.count == STEPS
    assert state.synced == [(0, 0, ((-1, 0),))]
    assert steps.taken == [(0, step) for step in range(STEPS)]
    assert not dist.is_initialized()


def test_an_error_is_reported_rolled_back_and_the_step_taken_again(run):
    def script(agent):
        erred = up_then_error(agent)
        assert (erred.step, erred.message, erred.retry) == (3, "ValueError: bad batch", True)
        assert "in act" in erred.traceback
        again(agent, 3)

    steps = Steps(_3=once(ValueError("bad batch")))
    state = run(script, steps)
    assert state.count == STEPS
    assert state.synced == [(0, 0, ((-1, 0),)), (1, 3, ((0, 3),))]
    assert steps.taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (1, 5)]


def test_nothing_is_entered_before_the_broken_world_is_over(run):
    def script(agent):
        up_then_error(agent)
        agent.enter(1, after=9)
        over(agent, 1, 3)
        begin(agent, 2, 3)
        finish(agent, 2)

    assert run(script, Steps(_3=once(ValueError()))).count == STEPS


def test_fatal_error_is_raised_even_if_the_group_cannot_be_left(run, monkeypatch, caplog):
    leave = Group.leave
    monkeypatch.setattr(Group, "leave", lambda group: leave(group) and False)

    def script(agent):
        assert not up_then_error(agent).retry

    with pytest.raises(NonRetryableException, match="no such file"):
        run(script, Steps(_2=once(NonRetryableException("no such file"))))
    assert "may still write" in caplog.text
    assert not [one for one in threading.enumerate() if "control" in one.name]
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_the_end_of_the_process_is_not_held_up(run, error):
    with pytest.raises(type(error)):
        run(begin, Steps(_2=once(error)))


def test_failures_are_counted_until_a_step_is_further_than_ever(run):
    def fail():
        raise ValueError("always")

    def script(agent):
        begin(agent)
        for generation, step in enumerate((1, 4, 4)):
            assert agent.hear(Erred).retry
            over(agent, generation, step)
            begin(agent, generation + 1, step)
        assert not agent.hear(Erred).retry

    steps = Steps(_1=once(ValueError()), _4=fail)
    with pytest.raises(RuntimeError, match=r"failed 3 times .* past step 4") as raised:
        run(script, steps, max_failures=2)
    assert "always" in str(raised.value.__cause__)


def test_the_limit_of_release_01(run, monkeypatch):
    monkeypatch.setattr(train, "MAX_FAILURES", 0)

    def script(agent):
        assert not up_then_error(agent).retry

    with pytest.raises(RuntimeError, match="max_failures is 0"):
        run(script, Steps(_1=once(ValueError())))


def in_a_collective():
    dist.all_reduce(torch.zeros(1))


def in_user_code():
    raise KeyError("what the end of the world has led to")


@pytest.mark.parametrize("fails", [in_a_collective, in_user_code])
def test_an_error_after_the_end_of_the_world_is_none_of_user_code(run, fails):
    reached = threading.Event()

    def act():
        if session.current().generation == 0:
            reached.set()
            wait_until_aborted()
            fails()

    def script(agent):
        begin(agent)
        assert reached.wait(30)
        again(agent, 2)

    assert run(script, Steps(_2=act), max_failures=0).count == STEPS


def test_a_world_that_is_over_without_a_collective_is_noticed_at_the_boundary(run):
    steps = Steps(end=10**9)

    def script(agent):
        begin(agent)
        agent.say(Over(0, "", finished=True))
        agent.hear(Stopped)

    state = run(script, steps)
    assert state.count == len(steps.taken)


def test_a_lost_peer_is_a_hint(run):
    def script(agent):
        begin(agent)
        lost = agent.hear(PeerLost)
        assert (lost.step, lost.message) == (1, "PeerLostError: connection reset")
        again(agent, 1)

    assert run(script, Steps(_1=once(PeerLostError("connection reset")))).count == STEPS


def test_a_store_out_of_reach_is_a_lost_peer(run):
    def script(agent):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        agent._store_port, kept = port, agent._store_port
        agent.enter(0)
        assert agent.hear(PeerLost).step == 0
        agent._store_port = kept
        again(agent, 0)

    def coordinator(end):
        return Coordinator(end, process_group_timeout=100)

    assert run(script, Steps(), coordinator=coordinator).count == STEPS


# --- step boundaries -----------------------------------------------------------------------------


class Held:
    """Steps of which the third lasts until the script lets it go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.steps = Steps(_2=self.hold)

    def hold(self):
        if session.current().generation == 0:
            self.reached.set()
            assert self.go_on.wait(30)

    def begin(self, agent):
        begin(agent)
        assert self.reached.wait(30)


def test_to_the_next_world_at_a_boundary(run):
    held = Held()

    def script(agent):
        held.begin(agent)
        agent.say(Ask(0))
        assert agent.hear(Entered) == Entered(0, 2)
        agent.enter(1, after=3)
        agent.say(Ping())  # answered after the order before it was taken
        agent.hear(Pong)
        held.go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 4)
        assert agent.up() == (1, 4)
        finish(agent, 1)

    state = run(script, held.steps)
    assert held.steps.taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    assert state.synced[1] == (1, 4, ((0, 4),))


def test_stop_at_a_boundary_and_leave(run):
    held = Held()

    def script(agent):
        held.begin(agent)
        agent.say(Ask(0))
        agent.hear(Entered)
        agent.say(Through(0, 2))
        held.go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 3)
        agent.say(Leave(15))

    with pytest.raises(SystemExit) as ended:
        run(script, held.steps)
    assert ended.value.code == 143
    assert held.steps.taken[-1] == (0, 2)


def test_at_the_end_of_the_data_elsewhere_the_last_step_is_run_to_its_end(run):
    held = Held()

    def script(agent):
        held.begin(agent)
        agent.say(Over(0, "done", finished=True, through=2))
        agent.say(Ping())
        assert not agent.hear(Pong).aborted
        held.go_on.set()
        assert agent.hear(Stopped) == Stopped(0, 3)

    assert run(script, held.steps).count == 3


# --- the table from exceptions to actions ---------------------------------------------------------


def caused_by(error, cause):
    error.__cause__ = cause
    return error


def while_handling(error, context):
    error.__context__ = context
    return error


def leaked():
    """A StopIteration that has left a native generator (PEP 479)."""

    def steps():
        yield next(iter(()))

    try:
        next(steps())
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenerationOver("over"), Kind.OVER),
        (PeerLostError("reset"), Kind.PEER_LOST),
        (StopIteration(), Kind.END_OF_DATA),
        (leaked(), Kind.END_OF_DATA),
        (StopException(), Kind.STOP),
        (NonRetryableException("no"), Kind.FATAL),
        (UnfitError("another model"), Kind.UNFIT),
        (while_handling(UnfitError(), PeerLostError()), Kind.UNFIT),
        (while_handling(OtherBitsError(), PeerLostError()), Kind.OTHER_BITS),
        (AnotherWorld("asked"), Kind.ASKED),
        (KeyboardInterrupt(), Kind.EXIT),
        (SystemExit(0), Kind.EXIT),
        (ValueError("a bug"), Kind.USER),
        (RuntimeError("a bug, too"), Kind.USER),
        (caused_by(ValueError(), PeerLostError()), Kind.PEER_LOST),
        (while_handling(KeyError(), GenerationOver()), Kind.OVER),
        (caused_by(RuntimeError(), while_handling(OSError(), PeerLostError())), Kind.PEER_LOST),
        (caused_by(NonRetryableException(), PeerLostError()), Kind.FATAL),
    ],
    ids=repr,
)
def test_kinds_of_errors_in_a_step(error, kind):
    assert kind_of(error, Where.STEP) is kind


@pytest.mark.parametrize(
    ("error", "where", "kind"),
    [
        (StopIteration(), Where.SYNC, Kind.USER),  # no data is ended outside of a step
        (leaked(), Where.SYNC, Kind.USER),
        (StopIteration(), Where.BETWEEN, Kind.USER),
        (leaked(), Where.BETWEEN, Kind.USER),
        (RuntimeError("connection refused"), Where.BUILD, Kind.PEER_LOST),  # not user code
        (ConfigError("one backend"), Where.BUILD, Kind.USER),  # a refusal of ours
        (GenerationOver(), Where.BUILD, Kind.OVER),
        (KeyboardInterrupt(), Where.BUILD, Kind.EXIT),
        (UnfitError(), Where.BUILD, Kind.UNFIT),
    ],
    ids=repr,
)
def test_kinds_of_errors_elsewhere(error, where, kind):
    assert kind_of(error, where) is kind


def test_a_chain_may_be_a_ring():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert {*chain(first)} == {first, second}
    assert kind_of(first, Where.STEP) is Kind.USER


def test_outcome_of_each_kind_of_error():
    """While the world stands, and when it is over."""
    assert {kind: (decide(kind, over=False), decide(kind, over=True)) for kind in Kind} == {
        Kind.OVER: (Action.WAIT, Action.WAIT),
        Kind.PEER_LOST: (Action.HINT, Action.WAIT),
        Kind.ASKED: (Action.RETRY, Action.WAIT),
        Kind.USER: (Action.RETRY, Action.WAIT),
        Kind.END_OF_DATA: (Action.FINISH, Action.WAIT),
        Kind.STOP: (Action.FINISH, Action.WAIT),
        Kind.FATAL: (Action.GIVE_UP, Action.GIVE_UP),
        Kind.UNFIT: (Action.WITHDRAW, Action.WITHDRAW),
        Kind.OTHER_BITS: (Action.RAISE, Action.RAISE),
        Kind.EXIT: (Action.RAISE, Action.RAISE),
    }


def test_only_errors_of_user_code_use_up_the_failures():
    for kind in Kind:
        action = decide(kind, over=False, failures_left=False)
        assert (action is not decide(kind, over=False)) is (kind is Kind.USER)
    assert decide(Kind.USER, over=False, failures_left=False) is Action.GIVE_UP
    assert decide(Kind.USER, over=True, failures_left=False) is Action.WAIT


# --- what is around the loop: the environment, the slate, faults, ends of others, wrong input -----


def test_the_world_is_seen_by_the_script(run):
    seen = []

    def look():
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
        seen.append([env.get(name) for name in names])

    run(one_world(end=1, generation=7), Steps(end=1, _0=look))
    assert seen == [["0", "1", "127.0.0.1", "7"]]


def test_new_training_reports_its_beginning_once(run):
    begun = []

    def script(agent):
        one_error(3)(agent)
        begun.extend(agent.begun)

    run(script, Steps(_3=once(ValueError("no"))))
    assert begun == [Begins(0, 0, stored=False)]


def test_progress_is_written_to_the_status_page(run):
    descriptor = status_page.create()

    def script(agent):
        agent.say(StatusPage(), descriptor)
        one_world(generation=4)(agent)

    run(script, Steps())
    assert status_page.read_progress(descriptor) == (4, STEPS, math.inf)
    os.close(descriptor)


def test_faults_strike_at_their_step(run):
    faults.plan("raise@step=3,place=step.end")
    try:
        assert run(one_error(3), Steps()).count == STEPS
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
        again(agent, 0)

    state = run(script, Steps(), Failing())
    assert [count for _, count, _ in state.synced] == [0, 0]


def test_an_agent_that_is_gone_ends_the_training_with_what_was_wrong(run):
    def script(agent):
        up_then_error(agent)
        agent.end.close()

    with pytest.raises(ChannelLost) as raised:
        run(script, Steps(_1=once(ValueError("the last error"))))
    assert str(raised.value.__cause__) == "the last error"


def test_a_job_that_has_ended_otherwise_is_an_error(run):
    def script(agent):
        up_then_error(agent)
        agent.say(Closed("The job has ended: the same error came twice at step 1."))

    with pytest.raises(NonRetryableException, match="twice at step 1") as ended:
        run(script, Steps(_1=once(ValueError())))
    assert isinstance(ended.value, JobClosed)


@pytest.mark.alone
def test_a_step_costs_little(run):
    """CPU time of the training thread for what is not the user's, with a slate."""
    descriptor, count, spent = status_page.create(), 20_000, []

    def step(state):
        if state.count == 0:
            spent.append(time.thread_time())
        if state.count == count:
            spent.append(time.thread_time())
            raise StopIteration
        state.count += 1

    def script(agent):
        agent.say(StatusPage(), descriptor)
        one_world(count)(agent)

    run(script, step)
    os.close(descriptor)
    assert (spent[1] - spent[0]) / count < 20e-6


# --- wrong input ---------------------------------------------------------------------------------


def test_train_refuses_wrong_arguments():
    with pytest.raises(TypeError, match="CoordinatorP2P"):
        torchelastic.train(object(), Steps(), Counting())
    coordinator = CoordinatorP2P(init_method="tcp://nowhere/x?min_workers=1")
    with pytest.raises(TypeError, match=r"torchelastic\.State"):
        torchelastic.train(coordinator, Steps(), object())
    for wrong in ({"snapshot_every": 0}, {"checkpoint_every": 0}, {"max_failures": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            torchelastic.train(coordinator, Steps(), Counting(), **wrong)


def test_coordinator_refuses_wrong_arguments():
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
    links = [channel.WorkerLink(theirs)]
    monkeypatch.setattr(channel, "link", lambda: links[0])
    with ours:
        assert CoordinatorP2P().open() is links[0]
        with pytest.raises(ConfigError, match="call train once"):
            torchelastic.train(CoordinatorP2P(), Steps(), Counting())
        links[0].close()


def test_outside_of_a_world():
    coordinator = CoordinatorP2P(init_method="tcp://nowhere/x?min_workers=1")
    with pytest.raises(RuntimeError, match="not in a world"):
        _ = coordinator.rank
    with pytest.raises(RuntimeError, match="not in a world"):
        coordinator.rendezvous_barrier()


# --- snapshots, checkpoints, and what a step may be: a function, a generator, another state -------


def test_snapshots_may_be_taken_less_often(run):
    steps = Steps(_5=once(ValueError()))
    state = run(one_error(3), steps, snapshot_every=3)
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

    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.TorchState(model=model, optimizer=sgd, copy_before_write=True)
    assert run(one_error(5), step, state, snapshot_every=3).step == STEPS


def test_without_snapshots_nothing_is_rolled_back(run):
    class NoRollback(Counting):
        snapshot, apply = State.snapshot, State.apply

    def script(agent):
        assert up_then_error(agent).step == 2
        over(agent, 0, 2)
        begin(agent, 1, 2)
        agent.hear(Finished)
        agent.say(Over(1, "", finished=True))
        agent.hear(Stopped)

    state = run(script, Steps(_2=once(ValueError())), NoRollback())
    assert state.synced[1] == (1, 3, ((0, 2),))


def test_a_state_may_ask_for_its_rank_when_it_rolls_back(run):
    """As the states of 0.1 do, by torch.distributed or by their coordinator."""
    seen = []

    class Asking(Counting):
        def apply(self, snapshot):
            seen.append((dist.get_rank(), dist.get_world_size(), session.current().generation))
            super().apply(snapshot)

    run(one_error(2), Steps(_2=once(ValueError())), Asking())
    assert seen == [(0, 1, 0)]
    assert not dist.is_initialized()


def test_a_state_that_nobody_can_roll_back_ends_the_job(run):
    class Fragile(Counting):
        def apply(self, snapshot):
            raise Torn("the optimizer was in the middle")

    def script(agent):
        up_then_error(agent)
        over(agent, 0, -1)
        agent.enter(1)
        assert not agent.hear(Erred).retry

    with pytest.raises(NonRetryableException, match="No worker holds a complete state"):
        run(script, Steps(_2=once(ValueError())), Fragile())


@pytest.fixture
def store_here(tmp_path):
    made = checkpoint.FileSystemCheckpointManager(str(tmp_path))
    checkpoint.set_checkpoint_manager(made)
    yield made
    checkpoint.set_checkpoint_manager(None)


def test_checkpoints_are_written_and_loaded_where_nobody_has_more(run, store_here):
    run(one_world(5), Steps(end=5), checkpoint_every=2)

    def second(agent):
        begin(agent, 0, 4)
        agent.hear(Erred)
        again(agent, 5)  # memory is fresher than the checkpoint

    state = run(second, Steps(_5=once(ValueError())))
    assert state.synced == [(0, 4, ((-1, 4),)), (1, 5, ((0, 5),))]


@pytest.mark.parametrize(
    "error", [NonRetryableException("no such file"), SystemExit(3)], ids=["error", "exit"]
)
def test_a_checkpoint_in_flight_is_not_lost_to_an_error(run, store_here, monkeypatch, error):
    waited_for = threading.Event()
    create, wait = store_here.catalog.begin, checkpoint.finish

    def begin_when_waited_for(name):
        assert waited_for.wait(30)
        return create(name)

    def finish():
        waited_for.set()
        wait()

    monkeypatch.setattr(store_here.catalog, "begin", begin_when_waited_for)
    monkeypatch.setattr(checkpoint, "finish", finish)

    def script(agent):
        begin(agent)
        if isinstance(error, Exception):
            agent.hear(Erred)

    try:
        with pytest.raises(type(error)):
            run(script, Steps(_2=once(error)), checkpoint_every=2)
        assert len(store_here.list_checkpoints()) == 1
    finally:
        finish()


@pytest.mark.parametrize(
    ("versions", "new"),
    [
        ([(0, 3), (0, 3), (-1, 0), (0, 2)], [[0]]),
        ([(-1, 0), (-1, 0), (0, 3), (0, 3)], []),
    ],
)
def test_new_workers_of_the_own_replica_write_no_part(store_here, monkeypatch, versions, new):
    lost = []
    monkeypatch.setattr(store_here, "lost", lost.append)
    replica = SimpleNamespace(size=2, coordinate=1)
    stored_state.note_lost(SimpleNamespace(rank=3, replica=replica, versions=versions))
    stored_state.note_lost(SimpleNamespace(rank=3, replica=None, versions=versions))
    assert lost == new


def test_a_state_says_when_a_checkpoint_is_due(run, store_here):
    class Asking(Counting):
        def should_save_checkpoint(self, rank):
            return self.count == 3

    run(one_world(), Steps(), Asking())
    assert len(store_here.list_checkpoints()) == 1


# --- what a step may be --------------------------------------------------------------------------


def test_a_step_may_return_another_state(run):
    def step(state):
        if state.count == 3:
            raise StopIteration
        other = Counting()
        other.count = state.count + 1
        return other, SimpleWorkerStats(1.0)

    first = Counting()
    assert run(one_world(3), step, first).count == 3
    assert first.count == 0


def test_a_generator_is_made_again_in_every_world(run):
    made = []

    def steps(state):
        made.append(session.current().generation)
        act = Steps(_2=fail)
        while state.count < STEPS:
            act(state)
            yield

    fail = once(ValueError())
    assert run(one_error(2), steps, how=torchelastic.run_train).count == STEPS
    assert made == [0, 1]


def test_the_end_of_the_data_inside_a_generator(run):
    """Python makes a RuntimeError of it; 0.1 tried such a job again a hundred times."""

    def steps(state):
        data = iter(range(4))
        while True:
            next(data)
            state.count += 1
            yield state, SimpleWorkerStats(None)

    assert run(one_world(4), steps, how=torchelastic.run_train).count == 4


# --- the coordinator's hooks, and who says that the training is done ------------------------------


@pytest.fixture
def made():
    """The coordinators of a test."""
    return []


@pytest.fixture
def run_hooked(run, made):
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


def test_hooks_of_the_user_are_called(run_hooked, made):
    run_hooked(one_error(1, end=3), Steps(end=100, _1=once(ValueError("odd"))), Hooked)
    one, two, three = ([f"monitor {n}", "save?", f"report {n}"] for n in (1, 2, 3))
    assert made[0].calls == [*one, "error odd", *two, *three]


def test_coordinator_that_asks_for_another_world_gets_it_and_no_step_comes_twice(run_hooked, made):
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
    assert run_hooked(script, steps, Asking).count == STEPS
    assert steps.taken == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert not [call for call in made[0].calls if call.startswith("error")], "it is no failure"


def test_a_training_that_is_done_when_its_world_ends_takes_no_step_in_the_next(run_hooked, made):
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
    assert run_hooked(script, steps, Waiting).count == 3
    assert steps.taken == [(0, 0), (0, 1), (0, 2)]


def test_a_training_that_is_done_where_another_world_begins_finishes_there(run_hooked, made):
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

    assert run_hooked(script, Steps(end=100, _2=last_step)).count == 3


def test_a_last_step_that_fails_is_taken_again(run_hooked, made):
    fail = once(ValueError())

    def act():
        made[0].signal_training_done()
        fail()

    assert run_hooked(one_error(2, end=3), Steps(end=100, _2=act)).count == 3


def test_slow_workers_are_noticed(run_hooked, made, monkeypatch):
    monkeypatch.setattr("torchelastic.p2p.CoordinatorP2P.MONITOR_PROGRESS_FREQ", 2)
    monkeypatch.setattr("torchelastic.training.coordinator._gather", lambda rate: [rate, 2 * rate])
    seen = []

    def step(state):
        seen.append(made[0].is_worker_straggler)
        if state.count == 3:
            raise StopIteration
        state.count += 1
        return state, SimpleWorkerStats(5.0)

    run_hooked(one_world(3), step)
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
