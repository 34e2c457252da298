"""The copy that a checkpoint is written from: made behind the training, and never of two steps."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.unit.checkpoint.conftest import after, saved, state, steps
from torchelastic import TorchState, checkpoint, faults
from torchelastic.checkpoint import checkpoint_store as store_module
from torchelastic.checkpoint import save_job
from torchelastic.errors import CheckpointError
from torchelastic.system import memory_limit
from torchelastic.tensors import agreement


@pytest.fixture
def behind(open_store, tmp_path, monkeypatch):
    """A store that takes any state for a large one, and what was saved of `lasting` tensors."""
    monkeypatch.setattr(store_module, "LARGE", 1)
    return open_store(tmp_path, writer="thread")


def held(store, monkeypatch):
    """Have the thread wait before it copies anything."""
    go = threading.Event()
    monkeypatch.setattr(store, "_finish_copy", after(go, store._finish_copy))
    return go


def large(value):
    return torch.full((1 << 15,), float(value))


def test_store_copies_lasting_tensors_before_their_write(behind, monkeypatch):
    """Nobody has copied it by then: who waits does it, and that is the cost."""
    go, weight, other = held(behind, monkeypatch), large(1), large(1)
    assert behind.save({"w": weight, "b": other}, 1, lasting=[weight])
    other.fill_(2)
    before = behind._blocked
    behind.before_write()
    weight.fill_(2)
    behind.before_write()  # once is enough
    go.set()
    behind.finish()
    found = behind.load().tree
    assert found["w"].eq(1).all()
    assert found["b"].eq(1).all()
    assert behind._measured.blocked == behind._blocked > before


def test_a_state_that_is_written_to_meanwhile_is_not_stored(behind, monkeypatch, caplog):
    """From then on all is copied before save returns."""
    saved(behind, 1)
    go, weight = held(behind, monkeypatch), large(1)
    assert behind.save({"w": weight}, 2, lasting=[weight])
    weight.fill_(2)
    go.set()
    with pytest.raises(CheckpointError, match=rf"checkpoint of step 2 to {behind.url}: parameters"):
        behind.finish()
    assert behind.load().step == 1
    assert behind.save({"w": weight}, 3, lasting=[weight])
    weight.fill_(3)
    behind.finish()
    assert behind.load().tree["w"].eq(2).all()


def test_large_states_are_written_by_another_process(open_store, tmp_path):
    store = open_store(tmp_path)
    small = store._way(store_module.LARGE - 1)
    assert store._process is None
    assert store._way(store_module.LARGE) == store._process.run != small


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr(
        memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 100, 100)]
    )


def test_without_memory_for_a_copy_training_waits_until_it_is_written(behind, no_memory, caplog):
    """From where it lies: better than no checkpoint at all."""
    weight = large(1)
    assert behind.save({"w": weight}, 1, lasting=[weight])
    assert steps(behind) == [1]
    weight.fill_(2)
    assert behind.load().tree["w"].eq(1).all()
    assert "Training waits until the checkpoint of step 1 is written: No room for" in caplog.text
    assert behind._stagings[0].descriptor == -1


def test_without_memory_storage_that_fails_is_reported_and_training_goes_on(
    behind, no_memory, caplog
):
    faults.plan("raise@place=checkpoint.write,generation=any")
    assert behind.save(state(1), 1)
    assert "Could not write the checkpoint of step 1" in caplog.text
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 1"):
        behind.finish()
    saved(behind, 2)
    assert steps(behind) == [2]


def test_a_state_that_is_loaded_is_copied_first(used, monkeypatch):
    """What is read back must not get into the checkpoint that is being written."""
    monkeypatch.setattr(used, "_writer", "thread")
    model = torch.nn.Linear(300, 300)
    trained = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    torch.nn.init.ones_(model.weight)
    checkpoint.save(trained, 1)
    checkpoint.finish()
    monkeypatch.setattr(store_module, "LARGE", 1)
    go = held(used, monkeypatch)
    torch.nn.init.zeros_(model.weight)
    checkpoint.save(trained, 2)
    assert checkpoint.load_latest(trained) == 1
    assert model.weight.eq(1).all()
    go.set()
    checkpoint.finish()
    assert checkpoint.load_latest(trained) == 2
    assert model.weight.eq(0).all()


@pytest.mark.slow  # the process that writes imports torch
def test_optimizers_wait_until_checkpoints_have_their_copy(used, monkeypatch):
    """And nothing else has to be done for it; here the process that writes is a real one."""
    monkeypatch.setattr(store_module, "LARGE", 1)
    go = held(used, monkeypatch)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained = TorchState(model=model, optimizer=optimizer)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    weight, average = (
        model.weight.detach().clone(),
        optimizer.state[model.weight]["exp_avg"].clone(),
    )
    checkpoint.save(trained, 1)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    go.set()
    checkpoint.finish()
    assert checkpoint.load_latest(trained) == 1
    assert torch.equal(model.weight, weight)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], average)


# --- one rank of several --------------------------------------------------------------------------


@pytest.fixture
def one_of_two(monkeypatch):
    """This process takes part as rank 1 of 2; what is agreed on is what it says itself."""
    monkeypatch.setattr(store_module, "_place", lambda: (1, 2))
    monkeypatch.setattr(agreement, "largest", lambda *numbers: list(numbers))
    monkeypatch.setattr(agreement, "of_rank_0", lambda _: {"token": "abcdef", "sequence": 7})


def test_a_rank_without_memory_writes_its_part_and_keeps_count(
    open_store, tmp_path, one_of_two, monkeypatch
):
    """The next checkpoint has one name on all ranks."""
    store = open_store(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 100, 100)])
        assert store.save(state(1), 1, together=True)
    assert store.save(state(2), 2, together=True)
    store.finish()
    parts = sorted(tmp_path.glob(".new-*/part-1"))
    names = [path.parent.name for path in parts]
    assert names == [".new-000007-step1-abcdef", ".new-000008-step2-abcdef"]


def test_a_rank_whose_copy_was_disturbed_leaves_word(open_store, tmp_path, one_of_two, monkeypatch):
    monkeypatch.setattr(store_module, "LARGE", 1)
    store = open_store(tmp_path, writer="thread")
    go, weight = held(store, monkeypatch), large(1)
    assert store.save({}, 1, own={"w": weight}, together=True, lasting=[weight])
    weight.fill_(2)
    go.set()
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 1"):
        store.finish()
    (word,) = tmp_path.glob(".new-*/failed-1")
    assert "changed before optimizer.step" in word.read_text()


def test_rank_0_does_not_wait_for_the_part_of_a_lost_worker(
    open_store, tmp_path, one_of_two, monkeypatch
):
    monkeypatch.setattr(store_module, "_place", lambda: (0, 2))
    store = open_store(tmp_path)
    assert store.save(state(1), 1, together=True)
    store.lost([1])
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: its worker was lo"):
        store.finish()
    store.lost([1])  # nothing is being written
    assert list(tmp_path.glob(".new-*")) == []


def test_a_part_that_is_there_counts_although_its_worker_is_lost(open_store, tmp_path, one_of_two):
    store = open_store(tmp_path)
    assert store.save(state(1), 1, together=True)
    store.finish()
    save_job.give_up_parts(store._part, store.catalog, [1, 2], "lost")
    found = {path.name for path in tmp_path.glob(".new-*/*-?")}
    assert found == {"part-1", "failed-2"}
