"""Ranks on different nodes that find different things: what all of them go on from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.training.keep_support import FakeSnapshotAgent, Ranks, build, finish, train
from torchelastic.checkpoint import finish as finish_checkpoints
from torchelastic.errors import ConfigError, SnapshotError
from torchelastic.snapshot import pieces, plain_parameters
from torchelastic.snapshot.layout import SHARED, own
from torchelastic.snapshot.messages import Settled
from torchelastic.snapshot.plain_parameters import (
    PlainParameters,
    different_forms,
    different_values,
)
from torchelastic.tensors import agreement

LOST = "Lost the agent at 10.0.0.7:4242 (timed out: no data is moving)."


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(pieces, "FETCH_PAUSE", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    peers = {}
    made = [FakeSnapshotAgent(name, peers) for name in ("a", "b")]
    peers.update({snapshot_agent.name: snapshot_agent for snapshot_agent in made})
    yield made
    for snapshot_agent in made:
        snapshot_agent.close()


@pytest.fixture
def apart(nodes, monkeypatch):
    """Ranks that do not train together, so that their parameters differ."""
    return Ranks(nodes, monkeypatch)


@pytest.fixture
def world(apart, monkeypatch):
    """The same, but nobody compares their parameters."""
    monkeypatch.setattr(plain_parameters, "LAST_COMMIT", 0)
    return apart


def trained(world, until):
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


def restored(world, monkeypatch, generation):
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
    assert trained(world, 5) == [0, 0]
    nodes[1].refusals = [LOST] * pieces.FETCH_TRIES
    begun, states = restored(world, monkeypatch, 1)
    assert begun == [5, 5]
    assert same(states)
    assert Settled((0, 5), 1) in nodes[0].told


def test_restore_asks_again_after_a_failed_fetch(world, nodes, monkeypatch, caplog):
    trained(world, 2)
    nodes[1].refusals = [LOST] * (pieces.FETCH_TRIES - 1)
    assert restored(world, monkeypatch, 1)[0] == [2, 2]
    assert "cannot fetch" not in caplog.text


def test_restore_of_an_absent_version_ends_the_generation(world, nodes, monkeypatch, make_store):
    """Neither for the checkpoint nor for an older version: the next generation has it."""
    make_store(every=5)
    trained(world, 9)
    finish_checkpoints()
    for node in nodes:
        node.refusals = [LOST] * pieces.FETCH_TRIES
        node.told.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    errors = trained(world, 12)
    for error in errors:
        assert isinstance(error, SnapshotError)
        assert "Step 9 is in memory, but rank 0 could not fetch it: Lost the agent at" in str(error)
    assert not any(isinstance(said, Settled) for node in nodes for said in node.told)
    assert restored(world, monkeypatch, 2)[0] == [9, 9]


def test_restore_sends_a_version_damaged_on_one_node(world, nodes, monkeypatch):
    trained(world, 4)
    nodes[0].damage(SHARED, (0, 4))
    begun, states = restored(world, monkeypatch, 1)
    assert begun == [4, 4]
    assert same(states)


def test_nodes_that_cannot_reach_each_other_send_it_over_the_group(world, nodes, monkeypatch):
    trained(world, 3)
    nodes[1].close()
    nodes[1].descriptors.clear()
    nodes[0].peers.clear()
    begun, states = restored(world, monkeypatch, 1)
    assert begun == [3, 3]
    assert same(states)


def test_commit_after_a_damaged_snapshot_is_refused_on_all_ranks(world, nodes, monkeypatch):
    """A large one is checked behind the first step: by then gradients are mixed."""
    monkeypatch.setattr(pieces, "CHECKED_FIRST", 0)
    trained(world, 5)
    nodes[0].damage(SHARED, (0, 5))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for ended in trained(world, 6):
        assert isinstance(ended, SnapshotError)
        assert "is damaged on the node of rank 0" in str(ended)
    assert [node.versions(own(rank))[0] for rank, node in enumerate(nodes)] == [(0, 5), (0, 5)]
    assert nodes[0].versions(SHARED) == [(0, 4)]
    assert nodes[1].versions(SHARED) == [(0, 5), (0, 4)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert trained(world, 6) == [5, 5]
    assert [node.versions(SHARED)[0] for node in nodes] == [(2, 6), (2, 6)]


def test_ranks_with_parameters_of_their_own_are_refused_before_anything_is_kept(apart, nodes):
    for ended in trained(apart, 1):
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
        "save checkpoints with torch.distributed.checkpoint."
    )


def test_the_first_difference_of_forms_is_named():
    stage = [("parameter 'first.weight'", "float32 of shape (4, 4)")]
    other = [("parameter 'last.weight'", "float32 of shape (4, 4)")]
    assert str(different_forms([stage, stage, other])) == (
        "Cannot keep this state: parameter 'first.weight' exists on rank 0, not on rank 2, and a "
        "restart would give all ranks those of one. Fix: give all ranks the same model, optimizers "
        "and parts; else do not keep it, and save checkpoints with torch.distributed.checkpoint."
    )
