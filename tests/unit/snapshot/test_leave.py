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
from tests.unit.snapshot.cast import (
    FakeSnapshotAgent,
    build,
    fingerprint,
    finish,
    step,
    train,
    trained,
)
from torchelastic.checkpoint import set_checkpoint_manager
from torchelastic.snapshot import agent_client
from torchelastic.snapshot import leave as snapshot_leave
from torchelastic.snapshot.layout import SHARED, shard
from torchelastic.snapshot.leave import Handover, LeaveTogether, RankReport, handovers
from torchelastic.tensors import module_state
from torchelastic.training.torch_state import TorchState
from torchelastic.worker.orders import Leave

SAVE, GO = Leave(signal.SIGTERM, None, saves=True), Leave(signal.SIGTERM, None, saves=False)


@pytest.fixture
def store(make_store):
    return make_store()


def leave(snapshot_agent, *orders):
    (on_leave,) = snapshot_agent.on_leave
    for order in orders:
        on_leave(order)
    for thread in threading.enumerate():
        if thread.name == "torchelastic-leave":
            thread.join()


def steps_in(store):
    return [one.step for one in store.catalog.records()]


def test_leave_stores_the_last_commit_wherever_the_step_is(
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


def test_leave_blocks_further_commits(snapshot_agent, store, signals):
    state = trained(2)
    leave(snapshot_agent, SAVE)
    step(state)
    late = threading.Thread(target=state.commit, daemon=True)
    late.start()
    assert state._keeper._leave_alone.commit.locked()
    assert snapshot_agent.steps[-1] == 2
    state._keeper._leave_alone.commit.release()  # in place of the end of the process
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
def test_leave_stores_if_chosen_and_in_time(
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


def test_leave_without_a_commit_stores_nothing(snapshot_agent, store, signals, caplog):
    state = trained(0)
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == []
    assert signals == [signal.SIGTERM]
    assert "there is no snapshot to save: this node has no snapshot." in caplog.text
    finish(state)


def test_leave_after_a_restore_stores_its_step(snapshot_agent, store, signals, monkeypatch):
    finish(trained(2))
    snapshot_agent.on_leave.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    state = build()
    assert state.restore() == 2
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == [2]
    finish(state)


def test_leave_with_damaged_snapshots_stores_nothing(snapshot_agent, store, signals, caplog):
    state = trained(2)
    finish(state)
    for version in snapshot_agent.versions(SHARED):
        snapshot_agent.damage(SHARED, version)
    leave(snapshot_agent, SAVE)
    assert steps_in(store) == []
    assert "damaged" in caplog.text
    assert signals == [signal.SIGTERM]


def test_leave_continues_if_saving_fails(snapshot_agent, store, signals, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no")

    state = trained(2)
    monkeypatch.setattr(snapshot_leave.checkpoint, "save_before_leaving", fail)
    leave(snapshot_agent, SAVE)
    assert "could not save the state" in caplog.text
    assert signals == [signal.SIGTERM]
    finish(state)


def test_leave_waits_for_the_snapshot_being_sealed(snapshot_agent, store, signals, monkeypatch):
    monkeypatch.setattr(snapshot_leave, "SEAL_TIMEOUT", 60.0)
    held = threading.Event()
    state = build()
    state.restore()
    state._keeper._writer._before_seal = lambda seconds: held.wait(30)
    train(state, 1)
    (on_leave,) = snapshot_agent.on_leave
    on_leave(SAVE)
    poll_for(state._keeper._leave_alone.commit.locked, what="the commit is held up")
    held.set()
    poll_for(lambda: signals, what="the worker is done")
    assert steps_in(store) == [1]
    finish(state)


def test_leave_is_listened_for_only_with_storage(snapshot_agent, make_store):
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


def test_state_dict_of_a_snapshot_has_the_names_of_the_modules():
    module = Tied()
    kept = {name: torch.full_like(one, 7) for name, one in module.named_parameters()}
    kept["passing"] = torch.full((1,), 7.0)
    made = module_state.state_dict_of(module, kept)
    assert list(made) == list(module.state_dict())
    assert all(bool((made[name] == 7).all()) for name in made if name != "_extra_state")
    assert made["_extra_state"] == {"extra": 1}


def test_leave_stores_several_models_as_they_are(snapshot_agent, store, signals, monkeypatch):
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


def test_leave_thread_is_no_daemon(snapshot_agent, store, signals, monkeypatch):
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


# --- sharded state --------------------------------------------------------------------------------


def reports(*nodes, peers=True):
    """Each node with two ranks, such as "012 leaves": the pieces that it holds."""
    found = []
    for number, words in enumerate(nodes):
        held, _, leaves = words.partition(" ")
        pieces = [shard(int(rank)) for rank in held]
        peer = f"p{number}" if peers else ""
        # The order reaches the ranks of a node one after the other.
        found += [RankReport(f"n{number}", bool(leaves), peer, pieces)]
        found += [RankReport(f"n{number}", False, peer, pieces)]
    return found


TABLE = [
    ("copies are on the next node", ("0145 leaves", "0123", "2345"), [], ""),
    ("no copies", ("01 leaves", "23", "45"), [(0, 2, 0), (1, 4, 0)], ""),
    ("copies leave, too", ("01 leaves", "0123 leaves", "2345"), [(0, 4, 0), (1, 4, 0)], ""),
    ("all leave", ("0123 leaves", "0123 leaves"), [], "0123"),
    ("a piece was not written", ("0 leaves", "23"), [(0, 2, 0)], "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "fetched", "lost"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_handovers_are_shared_between_staying_nodes(nodes, fetched, lost):
    found = handovers(reports(*nodes))
    expected = [Handover(shard(piece), rank, f"p{node}") for piece, rank, node in fetched]
    assert found == (expected, [shard(int(piece)) for piece in lost])


def test_handovers_without_addresses_are_lost_pieces():
    assert handovers(reports("01 leaves", "23", peers=False)) == ([], [shard(0), shard(1)])


def test_sharded_leave_without_a_commit_ends_after_half_of_the_time(monkeypatch):
    sent = []
    monkeypatch.setattr(snapshot_leave.os, "kill", lambda pid, signum: sent.append(signum))
    agent = FakeSnapshotAgent()
    leave = LeaveTogether(agent, 0)
    leave.listen()
    leave.listen()
    (told,) = agent.on_leave
    assert not leave.is_ordered
    assert leave.grace is None
    told(Leave(signal.SIGTERM, time.monotonic() + 0.02))
    assert leave.is_ordered
    assert leave._released.wait(10)
    assert sent == [signal.SIGTERM]
    agent.close()
