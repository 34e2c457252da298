"""The loop, in worlds of one worker, with an agent that does what the test says."""

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from tests.unit.training.fake_agent import (
    STEPS,
    Coordinator,
    Steps,
    again,
    begin,
    finish,
    once,
    one_world,
    over,
    up_then_error,
    wait_until_aborted,
)
from torchelastic.errors import ConfigError, NonRetryableException, StopException, UnfitError
from torchelastic.training import session, train
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
from torchelastic.worker.orders import (
    Ask,
    Entered,
    Erred,
    Leave,
    Over,
    PeerLost,
    Ping,
    Pong,
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
        Kind.EXIT: (Action.RAISE, Action.RAISE),
    }


def test_only_errors_of_user_code_use_up_the_failures():
    for kind in Kind:
        action = decide(kind, over=False, failures_left=False)
        assert (action is not decide(kind, over=False)) is (kind is Kind.USER)
    assert decide(Kind.USER, over=False, failures_left=False) is Action.GIVE_UP
    assert decide(Kind.USER, over=True, failures_left=False) is Action.WAIT
