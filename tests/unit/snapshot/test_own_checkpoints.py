"""Scripts that load checkpoints of their own and then call restore()."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR

from tests.unit.training.keep_support import FakeSnapshotAgent, Ranks, build, finish, step, train
from torchelastic.checkpoint import CheckpointStore, save, set_checkpoint_manager
from torchelastic.checkpoint import finish as finish_checkpoints
from torchelastic.errors import CheckpointError
from torchelastic.snapshot.layout import SHARED
from torchelastic.snapshot.own_checkpoints import Loaded, steps_taken
from torchelastic.tensors import agreement
from torchelastic.training.torch_state import TorchState
from torchelastic.worker.orders import Begins

# --- what ranks say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "taken", "step", "ranks", "unsaid"),
    [
        ([None, None], [0, 0], 0, [], 0),
        ([None, None], [50, 0], 0, [], 50),
        ([0, 0], [50, 50], 0, [0, 1], 0),
        ([50, 50], [50, 50], 50, [0, 1], 0),
        ([50, 0], [50, 0], 50, [0], 0),
        ([None, 50], [0, 50], 50, [1], 0),
    ],
)
def test_loaded_steps_of_all_ranks(starts, taken, step, ranks, unsaid):
    loaded = Loaded(starts, taken)
    assert (loaded.step, loaded.ranks, loaded.unsaid) == (step, ranks, unsaid)


def stepped(kind, times, **options):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(times):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "seen"),
    [
        (Adam, {}, 3),
        (Adagrad, {"initial_accumulator_value": 0.1}, 3),  # has state before its first step
        (SGD, {"momentum": 0.9}, 1),
        (SGD, {}, 0),
    ],
)
def test_steps_that_optimizers_have_taken(kind, options, seen):
    assert steps_taken([stepped(kind, 0, **options)], []) == 0
    assert steps_taken([stepped(kind, 3, **options)], []) == seen


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_shows_it_where_the_optimizer_does_not():
    scheduler = StepLR(stepped(SGD, 0), 10)
    assert steps_taken([], [scheduler, object()]) == 0
    scheduler.step()
    assert steps_taken([], [scheduler, object()]) == 1


# --- one rank -------------------------------------------------------------------------------------


def loaded(steps=50):
    """A script that has just loaded its own checkpoint."""
    state = build(seed=7)
    for _ in range(steps):
        step(state)
    state.sampler.committed()
    return state


def weights(state):
    return copy.deepcopy(state.module.state_dict())


def is_same(state, kept):
    return all(torch.equal(kept[name], found) for name, found in state.module.state_dict().items())


def test_restore_keeps_the_state_that_the_script_loaded(snapshot_agent, monkeypatch):
    state = loaded(5)
    before = weights(state)
    assert state.restore(start=5) == state.step == 5
    assert is_same(state, before)
    train(state, 7)
    finish(state)
    assert snapshot_agent.versions(SHARED) == [(0, 7), (0, 6)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = loaded(5)  # the script's file is older now
    assert again.restore(start=5) == 7
    assert is_same(again, weights(state))


def test_a_later_file_of_the_script_wins_over_older_snapshots(snapshot_agent, monkeypatch):
    state = build()
    state.restore()
    train(state, 3)
    finish(state)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = loaded(4)
    before = weights(again)
    assert again.restore(start=4) == 4
    assert is_same(again, before)
    train(again, 5)
    finish(again)
    assert snapshot_agent.versions(SHARED)[0] == (1, 5)


def test_an_unsaid_state_is_not_counted_from_0(snapshot_agent):
    with pytest.raises(CheckpointError, match=r"restore\(start=5\) if that is right"):
        loaded(5).restore()
    state = loaded(5)
    assert state.restore(start=0) == 0
    finish(state)
    new = build()
    assert new.restore() == 0
    finish(new)


def test_a_step_that_the_state_knows_need_not_be_said(snapshot_agent):
    state = TorchState(model=nn.Linear(1, 1), optimizer=stepped(Adam, 4), step=4)
    assert state.restore() == 4
    finish(state)


@pytest.mark.parametrize(("stored", "start", "expected"), [(3, 5, 5), (6, 5, 6), (3, None, 3)])
def test_beside_checkpoints_of_ours(snapshot_agent, make_store, caplog, stored, start, expected):
    make_store()
    save(loaded(stored), stored)
    finish_checkpoints()
    state = loaded(5)
    assert state.restore(start=start) == expected
    finish(state)
    assert ("replaced the state that the script loaded" in caplog.text) == (start is None)


def test_a_start_is_a_number_of_steps(snapshot_agent):
    with pytest.raises(ValueError, match="0 or more"):
        build().restore(start=-1)
    with pytest.raises(TypeError):
        build().restore(start="5")


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    peers = {}
    made = [FakeSnapshotAgent(name, peers) for name in ("a", "b")]
    peers.update({snapshot_agent.name: snapshot_agent for snapshot_agent in made})
    yield Ranks(made, monkeypatch)
    for snapshot_agent in made:
        snapshot_agent.close()


def restored(world, states, starts):
    def work(rank):
        begun = states[rank].restore(start=starts[rank])
        finish(states[rank])
        return begun

    return world.run(work)


def test_ranks_that_have_loaded_less_are_sent_the_rest(world, caplog):
    states = [build(seed=1), loaded(5)]
    before = weights(states[1])
    assert restored(world, states, [None, 5]) == [5, 5]
    assert is_same(states[0], before)
    assert steps_taken([states[0].optimizer], []) == 5
    assert "rank 1 called restore(start=5), rank 0 called restore(start=None)" in caplog.text


def test_each_rank_must_load_its_own_shards(world, monkeypatch):
    monkeypatch.setattr(agreement, "quick_group", lambda: None)
    states = [loaded(5), loaded(4)]
    for state in states:
        monkeypatch.setattr(state._shards, "any", True)
    errors = restored(world, states, [5, 4])
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "load the same step on all ranks" in str(errors[0])


def test_all_ranks_end_where_one_has_loaded_something_unsaid(world):
    errors = restored(world, [loaded(5), build()], [None, None])
    assert ["start=5" in str(error) for error in errors] == [True, True]


@pytest.mark.parametrize(
    ("start", "manager", "stored"),
    [(None, None, False), (0, None, True), (None, "manager", True)],
    ids=["nowhere", "by the script", "by the manager"],
)
def test_new_training_reports_whether_checkpoints_are_written(
    snapshot_agent, tmp_path, monkeypatch, start, manager, stored
):
    """And nothing once there is something to go on from."""
    if manager:
        set_checkpoint_manager(CheckpointStore(tmp_path))
    try:
        state = build()
        state.restore(start=start)
        train(state, 2)
        finish(state)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        again = build(seed=9)
        assert again.restore() == 2
        finish(again)
    finally:
        finish_checkpoints()
        set_checkpoint_manager(None)
    assert snapshot_agent.begun == [Begins(0, 0, stored)]
