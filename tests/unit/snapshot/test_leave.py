"""A worker that is told to leave: what it has committed goes to storage, if the time is enough."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import poll_for
from tests.unit.training.keep_support import build, fingerprint, finish, step, train, trained
from torchelastic.checkpoint import set_checkpoint_manager
from torchelastic.snapshot import agent_client
from torchelastic.snapshot import leave as snapshot_leave
from torchelastic.snapshot.layout import SHARED
from torchelastic.tensors import module_state
from torchelastic.training.state.torch_state import TorchState
from torchelastic.worker.orders import Leave

SAVE, GO = Leave(signal.SIGTERM, None, saves=True), Leave(signal.SIGTERM, None, saves=False)


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def signals(monkeypatch):
    """What the worker sends to itself in the end."""
    sent = []
    monkeypatch.setattr(snapshot_leave.os, "kill", lambda pid, signum: sent.append(signum))
    return sent


def leave(snapshot_agent, *orders):
    (on_leave,) = snapshot_agent.on_leave
    for order in orders:
        on_leave(order)
    for thread in threading.enumerate():
        if thread.name == "torchelastic-leave":
            thread.join()


def steps_in(store):
    return [one.step for one in store.catalog.records()]


def test_what_was_committed_is_stored_wherever_the_step_is(
    snapshot_agent, store, signals, monkeypatch
):
    state = trained(3)
    step(state)  # written to, and not committed
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == [3]
    assert signals == [signal.SIGTERM]
    finish(state)
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    again = build(seed=8)
    assert again.restore() == 3
    set_checkpoint_manager(None)
    expected = trained(3)
    # All but the random states, which are each worker's own.
    assert fingerprint(again)[0][:-1] == fingerprint(expected)[0][:-1]
    assert fingerprint(again)[1][:-1] == fingerprint(expected)[1][:-1]


def test_no_step_is_committed_any_more(snapshot_agent, store, signals):
    state = trained(2)
    leave(snapshot_agent, SAVE)
    step(state)
    late = threading.Thread(target=state.commit, daemon=True)
    late.start()
    assert state._departure.commit.locked()
    assert snapshot_agent.steps[-1] == 2
    state._departure.commit.release()  # in place of the end of the process
    late.join()
    assert snapshot_agent.steps[-1] == 3
    finish(state)


@pytest.mark.parametrize(
    ("orders", "choice", "seconds", "expected"),
    [
        ([Leave(signal.SIGINT, None), GO], 60.0, None, []),
        ([Leave(signal.SIGTERM, None)], 0.01, None, [2]),
        ([SAVE], 60.0, 1000.0, []),
        ([SAVE], 60.0, 0.001, [2]),
    ],
    ids=["another node writes", "the leader does not choose", "too little time", "enough time"],
)
def test_who_stores_it(
    orders, choice, seconds, expected, snapshot_agent, store, signals, monkeypatch
):
    monkeypatch.setattr(snapshot_leave, "CHOICE_TIMEOUT", choice)
    state = trained(2)
    if seconds is not None:
        store.seconds = seconds
        orders = [replace(one, deadline=time.monotonic() + 60) for one in orders]
    leave(snapshot_agent, *orders)
    assert steps_in(store) == expected
    assert signals == [signal.SIGTERM]
    finish(state)


def test_nothing_committed_is_nothing_to_store(snapshot_agent, store, signals, caplog):
    state = trained(0)
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == []
    assert signals == [signal.SIGTERM]
    assert "there is no snapshot to save: this node has no snapshot." in caplog.text
    finish(state)


def test_what_was_gone_on_from_is_stored_too(snapshot_agent, store, signals, monkeypatch):
    finish(trained(2))
    snapshot_agent.on_leave.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    state = build()
    assert state.restore() == 2
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == [2]
    finish(state)


def test_what_is_damaged_is_not(snapshot_agent, store, signals, caplog):
    state = trained(2)
    finish(state)
    for version in snapshot_agent.versions(SHARED):
        snapshot_agent.damage(SHARED, version)
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == []
    assert "damaged" in caplog.text
    assert signals == [signal.SIGTERM]


def test_a_worker_goes_whatever_fails(snapshot_agent, store, signals, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no")

    state = trained(2)
    monkeypatch.setattr(snapshot_leave.checkpoint, "save_before_leaving", fail)
    leave(snapshot_agent, SAVE)
    assert "could not save the state" in caplog.text
    assert signals == [signal.SIGTERM]
    finish(state)


def test_a_snapshot_that_is_being_sealed_is_waited_for(snapshot_agent, store, signals, monkeypatch):
    monkeypatch.setattr(snapshot_leave, "SEAL_TIMEOUT", 60.0)
    held = threading.Event()
    state = build()
    state.restore()
    state._keeper._writer._before_seal = lambda seconds: held.wait(30)
    train(state, 1)
    (on_leave,) = snapshot_agent.on_leave
    on_leave(SAVE)
    poll_for(state._departure.commit.locked, what="the commit is held up")
    held.set()
    poll_for(lambda: signals, what="the worker is done")
    assert steps_in(store) == [1]
    finish(state)


def test_who_could_store_nothing_is_asked_for_nothing(snapshot_agent, make_store):
    finish(trained(1))
    assert snapshot_agent.on_leave == []
    make_store()
    state = trained(2)
    assert len(snapshot_agent.on_leave) == 1
    state.restore()
    assert len(snapshot_agent.on_leave) == 1, "once is enough"
    finish(state)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def get_extra_state(self):
        return {"extra": 1}

    def set_extra_state(self, state):
        pass


def test_the_state_dict_of_a_snapshot_has_the_names_of_the_modules():
    module = Tied()
    kept = {name: torch.full_like(one, 7) for name, one in module.named_parameters()}
    kept["passing"] = torch.full((1,), 7.0)
    made = module_state.state_dict_of(module, kept)
    assert list(made) == list(module.state_dict())
    assert all(bool((made[name] == 7).all()) for name in made if name != "_extra_state")
    assert made["_extra_state"] == {"extra": 1}


def test_a_state_of_several_models_is_stored_as_it_is(snapshot_agent, store, signals, monkeypatch):
    def several():
        torch.manual_seed(1)
        models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        optimizers = [torch.optim.Adam(model.parameters()) for model in models.values()]
        return TorchState(model=models, optimizer=optimizers, best=1.5)

    state = several()
    state.restore()
    for name, optimizer in zip("ab", state.optimizer, strict=True):
        state.model[name](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state.best = 2.5
    state.commit()
    leave(snapshot_agent, SAVE)
    finish(state)
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    again = several()
    assert again.restore() == 1
    assert again.best == 2.5
    for name in "ab":
        assert torch.equal(again.model[name].weight, state.model[name].weight)


def test_the_interpreter_waits_for_it_if_the_script_fails(
    snapshot_agent, store, signals, monkeypatch
):
    """It is begun by the thread that listens to the agent, which is a daemon."""
    monkeypatch.setattr(snapshot_leave, "CHOICE_TIMEOUT", 60.0)
    state = trained(2)
    (on_leave,) = snapshot_agent.on_leave
    order = Leave(signal.SIGTERM, None)
    listener = threading.Thread(target=on_leave, args=[order], daemon=True)
    listener.start()
    listener.join()
    [leaving] = [one for one in threading.enumerate() if one.name == "torchelastic-leave"]
    assert not leaving.daemon
    leave(snapshot_agent, GO)
    finish(state)
