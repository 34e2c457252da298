"""Run + keep: what was committed comes back, on one rank and on several, from memory or storage."""

from __future__ import annotations

import copy
import json
import logging
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR

from tests.support import poll_for
from tests.unit.snapshot.cast import (
    Data,
    build,
    fingerprint,
    finish,
    step,
    train,
    trained,
)
from torchelastic.checkpoint import CheckpointStore, save, set_checkpoint_manager
from torchelastic.checkpoint import finish as finish_checkpoints
from torchelastic.data import DataLoader, ElasticSampler, Ledger
from torchelastic.errors import CheckpointError, ConfigError, SnapshotError
from torchelastic.snapshot import agent_client, pieces, plain_parameters, restore, state_tree
from torchelastic.snapshot import writer as snapshot_writer
from torchelastic.snapshot.layout import SHARED, own
from torchelastic.snapshot.messages import Sealed, Settled
from torchelastic.snapshot.own_checkpoints import Loaded, steps_taken
from torchelastic.snapshot.plain_parameters import (
    PlainParameters,
    different_forms,
    different_values,
)
from torchelastic.tensors import agreement
from torchelastic.tensors.tensor_bytes import PIECE
from torchelastic.training import session
from torchelastic.training.torch_state import TorchState
from torchelastic.worker.orders import Begins


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


def test_snapshot_has_tensors_that_were_replaced_since_the_one_before(snapshot_agent):
    state = trained(1)
    for tensor in (state.module[3].weight, state.module[1].running_mean):
        tensor.data = tensor.data + 1
    train(state, 2)
    finish(state)
    again = build(seed=9)
    assert again.restore() == 2
    assert fingerprint(again)[0] == fingerprint(state)[0]


def test_a_snapshot_that_cannot_be_written_stops_nothing(snapshot_agent, monkeypatch, caplog):
    def fails(job):
        raise OSError("no")

    monkeypatch.setattr(snapshot_writer._Job, "_begin", fails)
    finish(trained(3))
    assert caplog.text.count("Could not write a snapshot") == 1
    assert snapshot_agent.versions(SHARED) == []


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


# --- ranks on different nodes that find different things: what all of them go on from -------------


@pytest.fixture
def world(apart, monkeypatch):
    """Ranks whose parameters nobody compares."""
    monkeypatch.setattr(plain_parameters, "LAST_COMMIT", 0)
    return apart


LOST = "Lost the agent at 10.0.0.7:4242 (timed out: no data is moving)."


def trained_together(world, until):
    """All ranks go on to this step, and end there; returns where each went on from, or how it
    ended."""

    def work(rank):
        state = build(seed=rank)
        try:
            begun = state.restore()
            train(state, until)
        finally:
            finish(state)
        return begun

    return world.run(work)


def restored_together(world, monkeypatch, generation):
    """Where the ranks of a generation go on from, and what they have then."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(generation))
    states = [build(seed=10 * generation + rank) for rank in range(world.size)]

    def work(rank):
        begun = states[rank].restore()
        finish(states[rank])
        return begun

    return world.run(work), states


def same(states):
    """Only if one was given the other's."""
    first, *others = ([p.detach() for p in state.module.parameters()] for state in states)
    return all(all(map(torch.equal, first, other)) for other in others)


def test_restore_sends_a_version_to_ranks_that_cannot_fetch_it(world, nodes, monkeypatch):
    assert trained_together(world, 5) == [0, 0]
    nodes[1].refusals = [LOST] * pieces.FETCH_TRIES
    begun, states = restored_together(world, monkeypatch, 1)
    assert begun == [5, 5]
    assert same(states)
    assert Settled((0, 5), 1) in nodes[0].told


def test_restore_asks_again_after_a_failed_fetch(world, nodes, monkeypatch, caplog):
    trained_together(world, 2)
    nodes[1].refusals = [LOST] * (pieces.FETCH_TRIES - 1)
    assert restored_together(world, monkeypatch, 1)[0] == [2, 2]
    assert "cannot fetch" not in caplog.text


def test_restore_of_an_absent_version_ends_the_generation(world, nodes, monkeypatch, make_store):
    """Neither for the checkpoint nor for an older version: the next generation has it."""
    make_store(every=5)
    trained_together(world, 9)
    finish_checkpoints()
    for node in nodes:
        node.refusals = [LOST] * pieces.FETCH_TRIES
        node.told.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    errors = trained_together(world, 12)
    for error in errors:
        assert isinstance(error, SnapshotError)
        assert "Step 9 is in memory, but rank 0 could not fetch it: Lost the agent at" in str(error)
    assert not any(isinstance(said, Settled) for node in nodes for said in node.told)
    assert restored_together(world, monkeypatch, 2)[0] == [9, 9]


def test_restore_sends_a_version_damaged_on_one_node(world, nodes, monkeypatch):
    trained_together(world, 4)
    nodes[0].damage(SHARED, (0, 4))
    begun, states = restored_together(world, monkeypatch, 1)
    assert begun == [4, 4]
    assert same(states)


def test_nodes_that_cannot_reach_each_other_send_it_over_the_group(world, nodes, monkeypatch):
    trained_together(world, 3)
    nodes[1].close()
    nodes[1].descriptors.clear()
    nodes[0].peers.clear()
    begun, states = restored_together(world, monkeypatch, 1)
    assert begun == [3, 3]
    assert same(states)


def test_commit_after_a_damaged_snapshot_is_refused_on_all_ranks(world, nodes, monkeypatch):
    """A large one is checked behind the first step: by then gradients are mixed."""
    monkeypatch.setattr(pieces, "CHECKED_FIRST", 0)
    trained_together(world, 5)
    nodes[0].damage(SHARED, (0, 5))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for ended in trained_together(world, 6):
        assert isinstance(ended, SnapshotError)
        assert "is damaged on the node of rank 0" in str(ended)
    assert [node.versions(own(rank))[0] for rank, node in enumerate(nodes)] == [(0, 5), (0, 5)]
    assert nodes[0].versions(SHARED) == [(0, 4)]
    assert nodes[1].versions(SHARED) == [(0, 5), (0, 4)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert trained_together(world, 6) == [5, 5]
    assert [node.versions(SHARED)[0] for node in nodes] == [(2, 6), (2, 6)]


def test_ranks_with_parameters_of_their_own_are_refused_before_anything_is_kept(apart, nodes):
    for ended in trained_together(apart, 1):
        assert isinstance(ended, ConfigError)
        assert "Cannot keep parameter '0.weight'" in str(ended)
        assert "other values on rank 1 than on rank 0" in str(ended)
    assert [node.inventory().holdings for node in nodes] == [(), ()]


def test_ranks_with_other_parameters_are_refused_before_they_train(apart):
    def work(rank):
        build(width=256 + rank).restore()

    for ended in apart.run(work):
        assert isinstance(ended, ConfigError)
        assert (
            "parameter '0.weight' is float32 of shape (256, 16) on rank 0 and float32 of shape "
            "(257, 16) on rank 1"
        ) in str(ended)


# --- plain parameters -----------------------------------------------------------------------------


NORMAL = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
NAN, INFINITY = float("nan"), float("inf")


class Model(nn.Module):
    """One parameter, and buffers that may differ."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=values.is_floating_point())
        self.register_buffer("mean", torch.randn(3))


def checked(monkeypatch, *ranks):
    """The check of the first rank, given the values of one parameter on each."""
    others = []
    monkeypatch.setattr(agreement, "extremes", lambda mine: others.append(mine) or (mine, mine))
    for values in ranks:
        parameters = PlainParameters([Model(values)])
        parameters.find()
        parameters.check()
    found = torch.stack(others)
    monkeypatch.setattr(agreement, "extremes", lambda _: (found.amin(0), found.amax(0)))
    monkeypatch.setattr(agreement, "gather", lambda _: [one[0].tolist() for one in others])
    parameters.check()


@pytest.mark.parametrize(
    "ranks",
    [
        (NORMAL, NORMAL),
        (NORMAL, NORMAL * (1 + 1e-6)),
        (NORMAL.bfloat16(), NORMAL.bfloat16() * 1.01),
        (NORMAL.t(), NORMAL.t().contiguous()),
        (torch.zeros(5), torch.zeros(5)),
        (torch.tensor(3.0), torch.tensor(3.0)),
        (torch.empty(0, 4), torch.empty(0, 4)),
        (NORMAL.to(torch.float8_e4m3fn), NORMAL.to(torch.float8_e4m3fn)),
        (NORMAL.to(torch.complex64), NORMAL.to(torch.complex64)),
        (torch.full((4,), NAN), torch.full((4,), NAN)),
        (torch.full((4,), -INFINITY), torch.full((4,), -INFINITY)),
    ],
)
def test_equal_parameters_are_kept(monkeypatch, ranks):
    checked(monkeypatch, *ranks)


@pytest.mark.parametrize(
    "ranks",
    [
        (NORMAL, NORMAL.flip(0)),
        (NORMAL, NORMAL, NORMAL * (1 + 1e-3)),
        (NORMAL.bfloat16(), NORMAL.bfloat16() * 1.2),
        (torch.zeros(5), torch.tensor([0.0, 0.0, 1e-8, 0.0, 0.0])),
        (torch.tensor(3.0), torch.tensor(4.0)),
        (torch.arange(9), torch.arange(9) + 1),
        (torch.ones(4), torch.full((4,), NAN)),
        (torch.full((4,), INFINITY), torch.full((4,), -INFINITY)),
    ],
)
def test_different_parameters_are_refused(monkeypatch, ranks):
    with pytest.raises(ConfigError, match="Cannot keep parameter 'weight': it is a plain tensor"):
        checked(monkeypatch, *ranks)


def test_a_parameter_that_is_gone_is_compared_as_zeros(monkeypatch):
    parameters = PlainParameters([model := Model(NORMAL)])
    assert parameters.find() == ("the number of plain parameters", "1")
    del model.weight
    seen = []
    monkeypatch.setattr(agreement, "extremes", lambda mine: seen.append(mine) or (mine, mine))
    parameters.check()
    assert not seen[0].any()


def test_the_rank_that_differs_most_is_named():
    said = [[1.0, 2.0], [1.0, 2.0], [1.0, 2.5], [1.0, 7.0]]
    assert str(different_values("parameter 'experts.weight'", said)) == (
        "Cannot keep parameter 'experts.weight': it is a plain tensor with other values on rank 3 "
        "than on rank 0, and a restart would give all ranks those of one. Fix: make it a DTensor "
        "(docs/guides/parallelism.md), or keep it equal on all ranks; else do not keep it, and "
        "save checkpoints with torch.distributed.checkpoint. If all ranks train one model by DDP, "
        "one of them computed wrongly or its memory changed (docs/guides/bad-numbers.md)."
    )


def test_the_first_difference_of_forms_is_named():
    stage = [("parameter 'first.weight'", "float32 of shape (4, 4)")]
    other = [("parameter 'last.weight'", "float32 of shape (4, 4)")]
    assert str(different_forms([stage, stage, other])) == (
        "Cannot keep this state: parameter 'first.weight' exists on rank 0, not on rank 2, and a "
        "restart would give all ranks those of one. Fix: give all ranks the same model, optimizers "
        "and parts; else do not keep it, and save checkpoints with torch.distributed.checkpoint."
    )


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


def restored_from(world, states, starts):
    def work(rank):
        begun = states[rank].restore(start=starts[rank])
        finish(states[rank])
        return begun

    return world.run(work)


def test_ranks_that_have_loaded_less_are_sent_the_rest(world, caplog):
    states = [build(seed=1), loaded(5)]
    before = weights(states[1])
    assert restored_from(world, states, [None, 5]) == [5, 5]
    assert is_same(states[0], before)
    assert steps_taken([states[0].optimizer], []) == 5
    assert "rank 1 called restore(start=5), rank 0 called restore(start=None)" in caplog.text


def test_each_rank_must_load_its_own_shards(world, monkeypatch):
    monkeypatch.setattr(agreement, "quick_group", lambda: None)
    states = [loaded(5), loaded(4)]
    for state in states:
        monkeypatch.setattr(state._shards, "any", True)
    errors = restored_from(world, states, [5, 4])
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "load the same step on all ranks" in str(errors[0])


def test_all_ranks_end_where_one_has_loaded_something_unsaid(world):
    errors = restored_from(world, [loaded(5), build()], [None, None])
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
