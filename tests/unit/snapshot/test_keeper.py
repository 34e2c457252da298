"""Run + keep, with an agent's memory in this process: what comes back is what was committed."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import poll_for
from tests.unit.training.keep_support import (
    Data,
    build,
    fingerprint,
    finish,
    step,
    train,
    trained,
)
from torchelastic.checkpoint import finish as finish_checkpoints
from torchelastic.checkpoint import save
from torchelastic.data import DataLoader, ElasticSampler, Ledger
from torchelastic.errors import CheckpointError, SnapshotError
from torchelastic.snapshot import agent_client, pieces, restore, state_tree
from torchelastic.snapshot import writer as snapshot_writer
from torchelastic.snapshot.layout import SHARED, own
from torchelastic.snapshot.messages import Sealed, Settled
from torchelastic.tensors.tensor_bytes import PIECE, SmallCopies
from torchelastic.training import session
from torchelastic.training.torch_state import TorchState


def generation(monkeypatch, number):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))


@pytest.fixture
def expected():
    """Ten steps that nothing has interrupted."""
    state = build()
    for _ in range(10):
        step(state)
        state.sampler.committed()
        state.step += 1
    return fingerprint(state)


def test_a_restarted_script_goes_on_to_the_same_bits(snapshot_agent, expected, monkeypatch):
    state = build()
    assert state.restore() == 0
    train(state, 4)
    step(state)  # in flight when it ends
    finish(state)
    for number, until in ((1, 7), (2, 10)):
        generation(monkeypatch, number)
        state = build(seed=90 + number)
        assert state.restore() == state.step > 0
        train(state, until)
        finish(state)
    assert fingerprint(state) == expected
    assert snapshot_agent.versions(SHARED) == [(2, 10), (2, 9)]
    assert Settled((1, 7), 2) in snapshot_agent.told


def test_commit_copies_small_tensors_at_once(snapshot_agent, monkeypatch):
    """The next forward changes buffers and random states while the rest is copied."""
    goes_on = hold_copies(monkeypatch)
    state = trained(1)
    before = fingerprint(state)[0]
    state.model(state.sampler.next())
    state.best.add_(1)
    goes_on.set()
    finish(state)
    again = build(seed=9)
    assert again.restore() == 1
    assert fingerprint(again)[0] == before


def hold_copies(monkeypatch):
    """Copies wait for the event that is returned."""
    goes_on, begin = threading.Event(), snapshot_writer._Job._begin

    def held(job):
        assert goes_on.wait(30)
        return begin(job)

    monkeypatch.setattr(snapshot_writer._Job, "_begin", held)
    return goes_on


def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(snapshot_agent, monkeypatch):
    goes_on = hold_copies(monkeypatch)
    state = trained(1)
    before = state.module[3].weight.detach().clone()
    trainer = threading.Thread(target=step, args=(state,))
    trainer.start()
    poll_for(lambda: state.sampler.taken == 1, what="the next step")
    assert torch.equal(state.module[3].weight, before)
    goes_on.set()
    trainer.join()
    assert not torch.equal(state.module[3].weight, before)
    finish(state)
    again = build(seed=9)
    again.restore()
    assert torch.equal(again.module[3].weight, before)


def test_a_write_outside_the_optimizer_voids_the_snapshot_and_is_reported(
    snapshot_agent, monkeypatch, caplog
):
    goes_on = hold_copies(monkeypatch)
    state = trained(1)
    with torch.no_grad():
        state.module[3].weight.mul_(0.5)
    goes_on.set()
    step(state)
    state.commit()
    assert (0, 1) not in snapshot_agent.versions(SHARED)
    assert "changed between commit() and" in caplog.text
    with torch.no_grad():
        state.module[3].weight.mul_(0.5)  # copied by now: it does no harm any more
    finish(state)
    assert snapshot_agent.versions(SHARED) == [(0, 2)]
    assert caplog.text.count("changed between commit() and") == 1


def test_a_damaged_snapshot_is_passed_over(snapshot_agent, caplog):
    finish(trained(5))
    snapshot_agent.damage(SHARED, (0, 5))
    assert build().restore() == 4
    assert "This rank cannot use the snapshot of step 5" in caplog.text
    snapshot_agent.damage(own(0), (0, 4))  # which is no reason to go back further
    assert build().restore() == 4
    assert "This rank's per-rank state of step 4 is lost" in caplog.text
    snapshot_agent.damage(SHARED, (0, 4))
    with pytest.raises(SnapshotError, match="Snapshots up to step 5"):
        build().restore()


def test_a_rank_stopped_before_its_commit_goes_on_with_its_latest_random_states(
    snapshot_agent, caplog
):
    """The others had committed the step: a world of another size does not go back for it."""
    state = trained(3)
    random_states = torch.get_rng_state()
    train(state, 5)
    finish(state)
    for number in (4, 5):
        snapshot_agent.drop(own(0), (0, number))
    again = build(seed=9)
    assert again.restore() == 5
    assert torch.equal(torch.get_rng_state(), random_states)
    assert "Ranks 0 have no random states of step 5" in caplog.text
    assert "is lost" not in caplog.text


def test_the_agent_hears_of_a_commit_when_the_training_does_not_wait_for_the_copy_any_more(
    snapshot_agent, monkeypatch
):
    """It takes a core to handle that."""
    goes_on = hold_copies(monkeypatch)
    state = trained(1)
    assert snapshot_agent.versions(own(0)) == [(0, 1)]
    assert not any(isinstance(said, Sealed) for said in snapshot_agent.told)
    goes_on.set()
    finish(state)
    told = [said for said in snapshot_agent.told if isinstance(said, Sealed)]
    assert told == [Sealed(own(0), (0, 1)), Sealed(SHARED, (0, 1))]


def test_a_large_one_is_checked_behind_and_nothing_is_committed_from_it(
    snapshot_agent, monkeypatch
):
    monkeypatch.setattr(pieces, "CHECKED_FIRST", 0)
    finish(trained(5))
    snapshot_agent.damage(SHARED, (0, 5))
    generation(monkeypatch, 1)
    state = build()
    assert state.restore() == 5
    snapshot_agent.answering.clear()  # it need not have room to be told
    with pytest.raises(SnapshotError, match="is damaged"):
        train(state, 6)
    snapshot_agent.answering.set()
    finish(state)
    generation(monkeypatch, 2)
    state = build()
    assert state.restore() == 4
    train(state, 6)
    finish(state)
    assert snapshot_agent.versions(SHARED)[0] == (2, 6)


def test_another_model_is_not_loaded_over_this_one(snapshot_agent, caplog):
    finish(trained(2))
    with pytest.raises(SnapshotError, match="To start from scratch, end the job"):
        build(width=128).restore()
    assert "a different model" in caplog.text


def test_a_refusal_is_reported_once_and_training_goes_on(snapshot_agent, caplog):
    snapshot_agent.refusal = "The node has no room for it."
    finish(trained(4))
    assert snapshot_agent.steps == [0, 1, 2, 3, 4], "the agent is told how far it is"
    assert [record.getMessage() for record in caplog.records if record.levelno >= 30] == [
        f"Training continues without snapshots of '{piece}': {snapshot_agent.refusal}"
        for piece in (own(0), SHARED)
    ]


def test_commit_without_memory_copies_nothing(snapshot_agent, monkeypatch):
    copied, copy = [], SmallCopies.copy
    monkeypatch.setattr(SmallCopies, "copy", lambda *of: (copied.append(of), copy(*of)))
    monkeypatch.setattr(snapshot_writer, "FIRST_MEMORY_TIMEOUT", 0.01)
    snapshot_agent.answering.clear()
    state = trained(2)
    assert copied == []  # there is no memory yet
    snapshot_agent.refusal = "The node has no room for it."
    snapshot_agent.answering.set()
    writer = state._keeper._writer
    poll_for(lambda: train(state, state.step + 1) or not writer.keeps_shared, what="the refusal")
    monkeypatch.setattr(state._keeper._tree, "flatten", lambda _: pytest.fail("it is refused"))
    train(state, state.step + 2)
    finish(state)
    assert copied == []


def test_an_answer_that_comes_too_late_is_no_refusal(snapshot_agent, monkeypatch, caplog):
    room, late = snapshot_agent.request_memory, [True, True]

    def busy(*wanted):
        if late:
            late.pop()
            raise agent_client.Unanswered("Timed out waiting for the agent's answer.")
        return room(*wanted)

    monkeypatch.setattr(snapshot_agent, "request_memory", busy)
    state = trained(3)
    poll_for(
        lambda: train(state, state.step + 1) or snapshot_agent.versions(SHARED), what="a snapshot"
    )
    finish(state)
    assert caplog.text.count("yet; asking again") == 2


def test_an_agent_that_does_not_answer_blocks_nothing(snapshot_agent, monkeypatch):
    monkeypatch.setattr(snapshot_writer, "FIRST_MEMORY_TIMEOUT", 0.01)
    snapshot_agent.answering.clear()
    state = trained(3)
    assert snapshot_agent.versions(SHARED) == []
    snapshot_agent.answering.set()
    poll_for(lambda: set(snapshot_agent.descriptors) == {SHARED, own(0)}, what="its answers")
    poll_for(
        lambda: train(state, state.step + 1) or snapshot_agent.versions(SHARED), what="a snapshot"
    )
    finish(state)


def test_a_state_that_grows_gets_more_room(snapshot_agent):
    state = trained(1)
    state.best = torch.ones(100_000)
    train(state, 2)
    finish(state)
    again = build()
    assert again.restore() == 2
    assert len(again.best) == 100_000


def test_a_snapshot_that_cannot_be_written_stops_nothing(snapshot_agent, monkeypatch, caplog):
    def fails(job):
        raise OSError("no")

    monkeypatch.setattr(snapshot_writer._Job, "_begin", fails)
    finish(trained(3))
    assert caplog.text.count("Could not write a snapshot") == 1
    assert snapshot_agent.versions(SHARED) == []


def test_flattened_once_as_long_as_the_tensors_are_the_same(snapshot_agent):
    state = trained(1)
    tree, shared = state._keeper._tree, state._keeper._writer._shared
    first, plan = tree._flat, shared._plan
    train(state, 2)
    assert (tree._flat, shared._plan) == (first, plan)
    state.module[3].weight.data = state.module[3].weight.data.clone()
    train(state, 3)
    assert tree._flat is not first
    assert shared._plan is not plan
    finish(state)


def test_parameters_and_buffers_that_come_later_are_flattened(snapshot_agent):
    state = trained(1)
    tree = state._keeper._tree
    last = tree._flat
    state.module[4].register_parameter("gain", nn.Parameter(torch.ones(3)))
    assert tree.flatten_lasting() is not last
    state.module[0].register_buffer("late", torch.ones(5))
    assert "late" in tree.flatten(tree.flatten_lasting()).skeleton.decode()
    finish(state)


# --- the ledger -----------------------------------------------------------------------------------


def test_a_snapshot_is_sealed_when_the_ledger_has_its_step(snapshot_agent, tmp_path):
    sampler = ElasticSampler(8, shuffle=False)
    batches = iter(DataLoader(list(range(8)), batch_size=2, sampler=sampler))
    ledger = Ledger(tmp_path)
    state = TorchState(model=nn.Linear(1, 1), sampler=sampler, ledger=ledger)
    state.restore()
    for _ in range(2):
        next(batches)
        state.commit()
    state._keeper._writer.finish()
    lines = [json.loads(text) for text in (tmp_path / "g0-r0.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ids"]) for line in lines] == [(1, [0, 1]), (2, [2, 3])]
    next(batches)
    state._committed((3, 3))  # as `train` does it
    finish(state)
    ledger.close()
    assert json.loads((tmp_path / "g3-r0.jsonl").read_text())["ids"] == [4, 5]


def test_a_ledger_whose_disk_hangs_holds_up_one_snapshot(
    snapshot_agent, tmp_path, monkeypatch, caplog
):
    asked = []
    ledger = Ledger(tmp_path)
    monkeypatch.setattr(ledger, "flush", asked.append)  # None, as false as False
    state = TorchState(model=nn.Linear(1, 1), sampler=ElasticSampler(8), ledger=ledger)
    state.restore()
    for _ in range(3):
        state.commit()
    finish(state)
    assert asked == [snapshot_writer.LEDGER_TIMEOUT]
    assert snapshot_agent.versions(SHARED) == [(0, 3), (0, 2)]
    assert caplog.text.count("ledger's disk is hung") == 1
    ledger.close()


def test_a_ledger_needs_to_know_the_samples(tmp_path):
    with pytest.raises(TypeError, match="ElasticSampler"):
        TorchState(sampler=Data(), ledger=Ledger(tmp_path))


# --- without an agent -----------------------------------------------------------------------------


def test_a_plain_process_counts(monkeypatch, caplog):
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    caplog.set_level(logging.INFO)
    state = build()
    assert state.restore() == 0
    train(state, 3)
    assert state.step == 3
    assert state.sampler.position == 3
    assert caplog.text.count("only counts steps") == 1


def test_several_ranks_need_a_process_group(monkeypatch):
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        build().restore()


def test_steps_are_committed_in_order(snapshot_agent):
    state = build()
    with pytest.raises(RuntimeError, match="restore"):
        state.commit()
    state.restore()
    state.commit(step=5)
    with pytest.raises(ValueError, match="Cannot commit step 4 after step 5"):
        state.commit(step=4)
    assert state.step == 5, "nothing has moved"
    finish(state)


def test_train_restores_by_itself(monkeypatch):
    monkeypatch.setattr(session, "_current", object())
    with pytest.raises(RuntimeError, match="restores and commits itself"):
        build().restore()


# --- checkpoints ----------------------------------------------------------------------------------


def refused_amid_a_generation():
    """Memory stays behind at step 3, and training goes on."""
    state = trained(3)
    state._keeper._writer.finish()
    state._keeper._writer._shared.refuse()
    return state


def test_the_checkpoint_is_for_when_no_memory_is_left(snapshot_agent, make_store, monkeypatch):
    make_store()
    state = trained(2)
    save(state, 2)
    finish_checkpoints()
    parameters = [one.detach().clone() for one in state.module.parameters()]
    train(state, 3)
    finish(state)
    assert build().restore() == 3
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    again = build(seed=8)
    assert again.restore() == 2
    assert all(map(torch.equal, again.module.parameters(), parameters))
    train(again, 3)


def test_a_checkpoint_that_is_fresher_than_memory_is_taken_and_not_void(snapshot_agent, make_store):
    store = make_store(keep_last=1, every=5)
    state = refused_amid_a_generation()
    for done in (5, 10):
        train(state, done)
        finish_checkpoints()
    train(state, 12)
    finish(state)
    assert snapshot_agent.versions(SHARED) == [(0, 3), (0, 2)]
    assert build().restore() == 10
    store._claim.ensure()
    assert [one.step for one in store.catalog.records()] == [10]


def test_a_corrupt_checkpoint_does_not_beat_memory(snapshot_agent, make_store, tmp_path):
    make_store(every=5)
    state = refused_amid_a_generation()
    train(state, 5)
    finish_checkpoints()
    finish(state)
    (data,) = (tmp_path / "checkpoints").glob("*/*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert build().restore() == 3


def test_storage_that_hangs_does_not_keep_others_from_memory(
    snapshot_agent, make_store, monkeypatch, caplog
):
    stored = make_store()
    monkeypatch.setattr(restore, "STORAGE_TIMEOUT", 0.01)
    finish(trained(3))
    goes_on = threading.Event()
    monkeypatch.setattr(stored.catalog, "records", lambda: goes_on.wait(30) and iter(()))
    assert build().restore() == 3
    assert "Checkpoint storage did not respond" in caplog.text
    goes_on.set()
    names = {"torchelastic-storage", "torchelastic-fence"}
    poll_for(lambda: names.isdisjoint(one.name for one in threading.enumerate()), what="their end")


def test_a_checkpoint_that_cannot_be_loaded_is_an_error(snapshot_agent, make_store):
    make_store()
    save(build(width=128), 7)
    finish_checkpoints()
    with pytest.raises(CheckpointError, match="Could not load the latest checkpoint"):
        build().restore()


# --- DDP ------------------------------------------------------------------------------------------


def test_a_model_in_ddp_is_kept_without_it(snapshot_agent):
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    state = TorchState(model=wrapped)
    assert state.model is wrapped
    assert state.module is wrapped.module
    assert [name for name, _ in state._form()][:1] == ["parameter 'weight'"]
    with pytest.raises(TypeError, match="plain module"):
        state._begins_at()  # what `train` asks first


# --- the tree of a state --------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 5])
def threads(request, monkeypatch):
    monkeypatch.setattr(state_tree, "threads_of", lambda cores: request.param)
    return request.param


SIZES = [0, 1, 7, PIECE - 8, 3, 2 * PIECE + 5, PIECE, 11]


def test_every_byte_comes_where_it_belongs(threads):
    source = torch.randint(256, (sum(SIZES),), dtype=torch.uint8)
    parts = source.split(SIZES)
    room = torch.full((sum(SIZES) + 64 * len(SIZES),), 99, dtype=torch.uint8)
    rooms = [one[: len(one) - 64] for one in room.split([size + 64 for size in SIZES])]
    state_tree.fill(
        [(one, part.data_ptr()) for one, part in zip(rooms, parts, strict=True)],
    )
    assert all(map(torch.equal, rooms, parts))
    between = [one[len(one) - 64 :] for one in room.split([size + 64 for size in SIZES])]
    assert all((one == 99).all() for one in between)
    assert [one for one in threading.enumerate() if "load" in one.name] == []


def test_shares_are_of_equal_size_and_hold_everything():
    tensors = [torch.empty(size, dtype=torch.uint8) for size in SIZES]
    shares = list(state_tree.shared_out([(one, 1 << 40) for one in tensors]))
    sizes = [sum(count for _, _, count in share) for share in shares]
    assert sum(sizes) == sum(SIZES)
    assert set(sizes[:-1]) == {PIECE}
    assert list(state_tree.shared_out([])) == []


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 2, 4), (64, 1, 8), (96, 8, 8)],
)
def test_workers_of_a_node_share_its_cores(cores, workers, threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    assert state_tree.threads_of(set(range(cores))) == threads
