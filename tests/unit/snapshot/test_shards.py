"""Sharded state in memory, with a mesh of one rank: what is kept, what is refused, who votes how.

(Worlds of several ranks: `tests/process/test_keep_sharded.py`.)
"""

from __future__ import annotations

import io
import signal
import time
from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.snapshot.cast import finish
from torchelastic import checkpoint
from torchelastic.checkpoint import checkpoint_store, saving
from torchelastic.errors import CheckpointError, SnapshotError
from torchelastic.snapshot import agent_client, writer
from torchelastic.snapshot import leave as snapshot_leave
from torchelastic.snapshot.layout import SHARED, shard
from torchelastic.snapshot.messages import InventoryItem
from torchelastic.snapshot.pieces import find_shards
from torchelastic.snapshot.search import Node
from torchelastic.snapshot.shards import Piece
from torchelastic.snapshot.writer import ShardStatus
from torchelastic.tensors import agreement
from torchelastic.tensors.shard_layout import Split, region
from torchelastic.training.torch_state import TorchState
from torchelastic.worker.orders import Leave


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    from torch.distributed.device_mesh import DeviceMesh

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def plain(seed=0, spread=lambda parameter: parameter):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 140), nn.Linear(140, 3))  # one large, the others small
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(spread(parameter.detach())))
    return TorchState(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))


def build(mesh, seed=0, placement=None):
    from torch.distributed.tensor import Shard, distribute_tensor

    return plain(seed, lambda one: distribute_tensor(one, mesh, [placement or Shard(0)]))


def step(state):
    state.optimizer.zero_grad()
    for number, parameter in enumerate(state.model.parameters()):
        parameter.grad = torch.full_like(parameter, number + state.step + 1)
    state.optimizer.step()


def train(state, until):
    for _ in range(state.step, until):
        step(state)
        wait_until_sealed(state)
        state.commit()


def trained(mesh, until):
    state = build(mesh)
    state.restore()
    train(state, until)
    return state


def wait_until_sealed(state):
    """So that no step is passed over for the last one being under way."""
    state._keeper._writer.finish()


def everything(state):
    found = []
    for parameter in state.model.parameters():
        for tensor in (parameter.detach(), *state.optimizer.state[parameter].values()):
            found.append(getattr(tensor, "_local_tensor", tensor).tolist())
    return found


def restarted(mesh, monkeypatch, **more):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    return build(mesh, seed=9, **more)


@pytest.mark.parametrize("kind", ["Shard", "Replicate", "_StridedShard"])
def test_a_restarted_script_has_the_same_bits(kind, mesh, snapshot_agent, monkeypatch):
    from torch.distributed import tensor

    placement = {
        "Shard": tensor.Shard(0),
        "Replicate": tensor.Replicate(),
        "_StridedShard": tensor.placement_types._StridedShard(0, split_factor=2),
    }[kind]
    state = build(mesh, placement=placement)
    assert state.restore() == 0
    train(state, 3)
    finish(state)
    again = restarted(mesh, monkeypatch, placement=placement)
    assert again.restore() == 3
    assert everything(again) == everything(state)
    entries = again.optimizer.state[next(again.model.parameters())]
    assert isinstance(entries["exp_avg"], tensor.DTensor)
    assert entries["exp_avg"].placements == (placement,)
    step(state)
    step(again)
    assert everything(again) == everything(state)
    finish(again)


def test_steps_are_not_kept_while_the_last_one_has_no_copies(mesh, snapshot_agent):
    state = trained(mesh, 2)
    wait_until_sealed(state)
    snapshot_agent.arrives = False
    train(state, 5)
    assert snapshot_agent.versions(shard(0)) == [(0, 3), (0, 2)]
    assert snapshot_agent.versions(SHARED) == [(0, 3), (0, 2)]
    snapshot_agent.arrives = True
    train(state, 7)  # that it is sealed is told again, and the next one is begun
    finish(state)
    assert snapshot_agent.versions(shard(0)) == [(0, 7), (0, 3)]


def test_copies_that_never_come_are_reported_and_waited_for_no_longer(
    mesh, snapshot_agent, monkeypatch, caplog
):
    monkeypatch.setattr(writer, "REPLICA_TIMEOUT", 0.0)
    snapshot_agent.arrives = False
    finish(trained(mesh, 3))
    assert snapshot_agent.versions(shard(0)) == [(0, 3), (0, 2)]
    assert caplog.text.count("No other node has copied") == 1


def test_a_write_after_commit_voids_the_version_for_all(mesh, snapshot_agent, monkeypatch):
    state = trained(mesh, 2)
    step(state)
    state._keeper._writer._pool.submit(lambda: None).result()
    begin = writer._Job._begin

    def late(job):
        with torch.no_grad():
            next(state.model.parameters()).add_(1)
        return begin(job)

    monkeypatch.setattr(writer._Job, "_begin", late)
    state.commit()
    wait_until_sealed(state)
    monkeypatch.setattr(writer._Job, "_begin", begin)
    assert state._keeper._writer.shard_status() == ShardStatus.FAILED
    train(state, 4)
    finish(state)
    # The one before it was not overwritten: it was the last that all had.
    assert snapshot_agent.versions(shard(0)) == snapshot_agent.versions(SHARED) == [(0, 4), (0, 2)]


def test_without_memory_nothing_is_kept_and_training_goes_on(mesh, snapshot_agent, caplog):
    snapshot_agent.refusal = "There is no room."
    state = trained(mesh, 3)
    assert state._keeper._writer.shard_status() == ShardStatus.NEVER
    assert snapshot_agent.versions(shard(0)) == []
    finish(state)


def test_damaged_shards_are_no_base_and_no_reason_to_begin_again(mesh, snapshot_agent, monkeypatch):
    finish(trained(mesh, 3))
    snapshot_agent.damage(shard(0), (0, 3))
    assert restarted(mesh, monkeypatch).restore() == 2
    snapshot_agent.damage(shard(0), (0, 2))
    said = r"Snapshots up to step 3 exist, but rank 0 cannot use .*'shard:0' is damaged"
    with pytest.raises(SnapshotError, match=said):
        restarted(mesh, monkeypatch).restore()


def test_restore_refuses_an_unsharded_snapshot_for_sharded_state(
    mesh, snapshot_agent, monkeypatch, caplog
):
    whole = plain()
    whole.restore()
    whole.commit()
    finish(whole)
    with pytest.raises(SnapshotError, match="is sharded in only one"):
        restarted(mesh, monkeypatch).restore()
    assert "is sharded in only one of the snapshot and this script" in caplog.text


def test_unsupported_uses_of_sharded_state_are_refused(mesh, snapshot_agent):
    from torch.distributed.tensor import DTensor, Shard

    with pytest.raises(TypeError, match=r"make the mesh with torchelastic\.mesh"):
        build(mesh)._begins_at()
    with pytest.raises(TypeError, match="so one rank cannot save it"):
        build(mesh).save(io.BytesIO())
    state = build(mesh)
    state.restore()
    step(state)
    entries = state.optimizer.state[next(state.model.parameters())]
    entries["row"] = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="state/0/0/row: it is sharded differently"):
        state.commit()
    finish(state)


def test_partial_sums_are_refused_when_the_state_is_made(mesh):
    from torch.distributed.tensor import DTensor, Partial

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    with pytest.raises(TypeError) as refused:
        TorchState(model=model)
    assert str(refused.value) == (
        "Cannot snapshot the DTensor parameters/0/weight: with placement Partial, no rank holds "
        "its values. Fix: redistribute it to Shard or Replicate first."
    )


def test_optimizer_state_of_another_shape_is_kept_if_it_is_replicated(
    mesh, snapshot_agent, monkeypatch
):
    """A number, or the factors of a matrix."""
    from torch.distributed.tensor import DTensor, Replicate

    state = build(mesh)
    state.restore()
    for value in (1.0, 2.0):
        step(state)
        for entries in state.optimizer.state.values():
            for name, shape in (("count", ()), ("row", (5,))):
                local = torch.full(shape, value)
                entries[name] = DTensor.from_local(local, mesh, [Replicate()])
        wait_until_sealed(state)
        state.commit()
    finish(state)
    again = restarted(mesh, monkeypatch)
    assert again.restore() == 2
    assert everything(again) == everything(state)
    entries = again.optimizer.state[next(again.model.parameters())]
    assert entries["row"].placements == (Replicate(),)
    finish(again)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def store(make_store, monkeypatch):
    """One that takes any state for a large one, so that it is copied behind the next step."""
    monkeypatch.setattr(checkpoint_store, "LARGE", 1)
    monkeypatch.setattr(saving, "_used", None)
    return make_store(every=2)


def test_commit_takes_checkpoints_and_restore_reads_them(mesh, snapshot_agent, store, monkeypatch):
    """Every second step, behind the next one; nothing is left in memory."""
    state = build(mesh)
    state.restore()
    seen = {}
    for _ in range(5):
        step(state)
        wait_until_sealed(state)
        torch.manual_seed(state.step)  # what is this rank's own
        state.commit()
        store.wait()
        seen[state.step] = everything(state), torch.get_rng_state()
    finish(state)
    assert [found.step for found in store.list_checkpoints()] == [4, 2]
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    again = restarted(mesh, monkeypatch)
    assert again.restore() == 4
    bits, random = seen[4]
    assert everything(again) == bits
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("first", ["sharded", "whole"])
def test_a_checkpoint_is_read_whether_it_is_sharded_now_or_not(first, mesh, store, monkeypatch):
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    make = {"sharded": lambda seed: build(mesh, seed), "whole": plain}
    state = make.pop(first)(0)
    state.restore()
    for _ in range(2):
        step(state)
        state.commit()
    store.finish()
    ((_, other),) = make.items()
    again = other(9)
    assert again.restore() == 2
    assert everything(again) == everything(state)
    step(state)
    step(again)
    assert everything(again) == everything(state)


def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(mesh, store, monkeypatch):
    monkeypatch.setattr(agent_client, "connect", lambda: None)
    assert store.save({"model": {}, "format": "of somebody else"}, 2)
    store.finish()
    with pytest.raises(CheckpointError, match="was not written by a TorchState"):
        build(mesh).restore()


@pytest.mark.parametrize(
    ("grace", "seconds", "stored"),
    [(None, None, [1]), (60.0, 1.0, [1]), (60.0, 50.0, [])],
    ids=["nobody says how long", "long enough", "too short"],
)
def test_sharded_leave_stores_the_commit_and_exits(
    grace, seconds, stored, mesh, snapshot_agent, store, signals
):
    """Step 1, of which no checkpoint is due."""
    state = build(mesh)
    state.restore()
    (told,) = snapshot_agent.on_leave
    deadline = None if grace is None else time.monotonic() + grace
    told(Leave(signal.SIGTERM, deadline))
    store.seconds = seconds
    step(state)
    assert signals == []
    state.commit()
    assert signals == [signal.SIGTERM]
    assert [found.step for found in store.list_checkpoints()] == stored
    finish(state)


def test_sharded_leave_of_another_rank_stores_and_continues(
    mesh, snapshot_agent, store, signals, monkeypatch
):
    """Another rank has voted that it leaves."""
    monkeypatch.setattr(snapshot_leave, "STOP_OF_ALL_NODES", 0.0)
    state = build(mesh)
    state.restore()
    votes = iter([min(ShardStatus) - 1])
    vote = agreement.least
    monkeypatch.setattr(agreement, "least", lambda mine, *group: next(votes, vote(mine, *group)))
    for _ in range(3):
        step(state)
        wait_until_sealed(state)
        state.commit()
    store.finish()
    assert signals == []
    assert [found.step for found in store.list_checkpoints()] == [2, 1]
    finish(state)


def test_storage_that_cannot_be_read_is_an_error_on_all_ranks(mesh, store, monkeypatch):
    """Not on rank 0 alone, for which the others would wait."""

    def fails(*_):
        raise OSError("no route to it")

    monkeypatch.setattr(agent_client, "connect", lambda: None)
    monkeypatch.setattr(store.catalog, "sound", fails)
    with pytest.raises(CheckpointError, match=r"Could not read the checkpoints.*no route to it"):
        build(mesh).restore()


def test_one_rank_alone_stores_no_shards(mesh, store, monkeypatch):
    """The rest of them would be missing, and nobody would know until they are needed."""
    tensor = next(build(mesh).model.parameters())
    monkeypatch.setattr(type(tensor.device_mesh), "size", lambda self: 2)
    with pytest.raises(CheckpointError, match=r"'w' is sharded over ranks.*together=True"):
        store.save({"w": tensor}, 1)


class OfTheUser(checkpoint.CheckpointManager):
    """Knows streams only."""

    create_checkpoint = get_checkpoint = get_latest_checkpoint = list_checkpoints = None


def test_a_manager_of_streams_is_refused(mesh, snapshot_agent):
    state = build(mesh)
    checkpoint.set_checkpoint_manager(OfTheUser())
    try:
        with pytest.raises(TypeError, match="OfTheUser cannot store a state that is sharded"):
            state.restore()
    finally:
        checkpoint.set_checkpoint_manager(None)


# --- pieces of another world ----------------------------------------------------------------------


def written(sizes, whole):
    """The pieces that a mesh has written whose first dimension replicates, by name."""
    copies, count = sizes
    found = {}
    for rank in range(copies * count):
        part = region(whole.shape, [Split(0, count, rank % count)])
        local = torch.cat([whole[o[0] : o[0] + n[0]] for o, n in map(astuple, boxes(part))])
        found[shard(rank)] = Piece({"w": part}, {"w": local})
    return found


def boxes(part):
    return [box for box, _ in part.boxes()]


@pytest.mark.parametrize(
    ("sizes", "lost", "said"),
    [
        ((1, 4), [], ""),
        ((2, 2), [2], ""),  # rank 0 has written the same
        ((2, 2), [0, 3], ""),
        ((1, 4), [2], "no memory has [4:6, 0:3] of w; 'shard:2' is lost"),
        ((2, 2), [0, 2], "no memory has [0:4, 0:3] of w; 'shard:0' is lost; 'shard:2' is lost"),
    ],
)
def test_one_rank_reads_what_four_have_written(sizes, lost, said, mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole, version = torch.arange(24.0).view(8, 3), (0, 5)
    pieces = written(sizes, whole)
    held = tuple(
        InventoryItem(piece, version, 1, rank, len(pieces))
        for rank, piece in enumerate(pieces)
        if rank not in lost
    )
    targets = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Replicate()])}
    opened = []

    def opener(piece):
        opened.append(piece)
        return pieces[piece]

    found, wrong = find_shards(targets, 0, {"n": Node("", held, 0)}, version, opener)
    assert wrong == said
    if not said:
        found.copy()
        assert torch.equal(targets["w"].to_local(), whole)
    assert sorted(opened) == sorted(piece.piece for piece in held), "each once"


# --- pieces ---------------------------------------------------------------------------------------


def test_nonsense_is_no_piece():
    for skeleton in (
        b"",
        b"\xff",
        b"7\n{}\n{}",
        b"7\n[]\n[]",
        b'7\n{"tree":{"d":[]},"tensors":[]}\n{"w":[[0],[1]]}',
        b'7\n{"tree":{"d":[]},"tensors":[]}\n{"w":{"range":[]}}',
    ):
        with pytest.raises(SnapshotError):
            Piece.read("7", skeleton, memoryview(b""))
