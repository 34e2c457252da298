"""Snapshots, checkpoints, and what a step may be: a function, a generator, another state."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.unit.training.fake_agent import (
    STEPS,
    Counting,
    Steps,
    again,
    begin,
    once,
    one_error,
    one_world,
    over,
    up_then_error,
)
from torchelastic import SimpleWorkerStats, State, checkpoint
from torchelastic.errors import NonRetryableException
from torchelastic.training import session, stored_state
from torchelastic.training.state import Torn
from torchelastic.worker.orders import Erred, Finished, Over, Stopped


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
def manager(tmp_path):
    made = checkpoint.FileSystemCheckpointManager(str(tmp_path))
    checkpoint.set_checkpoint_manager(made)
    yield made
    checkpoint.set_checkpoint_manager(None)


def test_checkpoints_are_written_and_loaded_where_nobody_has_more(run, manager):
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
def test_a_checkpoint_in_flight_is_not_lost_to_an_error(run, manager, monkeypatch, error):
    waited_for = threading.Event()
    create, wait = manager.catalog.begin, checkpoint.finish

    def begin_when_waited_for(name):
        assert waited_for.wait(30)
        return create(name)

    def finish():
        waited_for.set()
        wait()

    monkeypatch.setattr(manager.catalog, "begin", begin_when_waited_for)
    monkeypatch.setattr(checkpoint, "finish", finish)

    def script(agent):
        begin(agent)
        if isinstance(error, Exception):
            agent.hear(Erred)

    try:
        with pytest.raises(type(error)):
            run(script, Steps(_2=once(error)), checkpoint_every=2)
        assert len(manager.list_checkpoints()) == 1
    finally:
        finish()


@pytest.mark.parametrize(
    ("versions", "new"),
    [
        ([(0, 3), (0, 3), (-1, 0), (0, 2)], [[0]]),
        ([(-1, 0), (-1, 0), (0, 3), (0, 3)], []),
    ],
)
def test_new_workers_of_the_own_replica_write_no_part(manager, monkeypatch, versions, new):
    lost = []
    monkeypatch.setattr(manager, "lost", lost.append)
    replica = SimpleNamespace(size=2, coordinate=1)
    stored_state.note_lost(SimpleNamespace(rank=3, replica=replica, versions=versions))
    stored_state.note_lost(SimpleNamespace(rank=3, replica=None, versions=versions))
    assert lost == new


def test_a_state_says_when_a_checkpoint_is_due(run, manager):
    class Asking(Counting):
        def should_save_checkpoint(self, rank):
            return self.count == 3

    run(one_world(), Steps(), Asking())
    assert len(manager.list_checkpoints()) == 1


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
