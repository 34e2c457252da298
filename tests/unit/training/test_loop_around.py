"""What is around the loop: the environment, the slate, faults, ends of others, wrong input."""

import math
import os
import socket
import time

import pytest

import torchelastic
from tests.unit.training.fake_agent import (
    STEPS,
    Counting,
    Steps,
    again,
    once,
    one_error,
    one_world,
    up_then_error,
)
from torchelastic import env, faults
from torchelastic.errors import ChannelLost, ConfigError, JobClosed, NonRetryableException
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import coordinator as coordinators
from torchelastic.worker import channel, status_page
from torchelastic.worker.orders import Begins, Closed, Erred, StatusPage


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
