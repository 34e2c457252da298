"""The same loader as torchdata's, and torchdata's own with our sampler."""

import json
import sys

import pytest
from torch import nn
from torchdata import stateful_dataloader as torchdata

from tests.unit.data.test_loader import expected, play
from tests.unit.data.worlds import PlacedSampler, World
from torchelastic import TorchState, data

# torchdata 0.11 calls a function that torch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def test_without_torchdata_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.delitem(sys.modules, "torchelastic.data.stateful", raising=False)
    with pytest.raises(ImportError, match="pip install torchdata"):
        _ = data.StatefulDataLoader


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_stateful_loader_keeps_samples_loaded_in_advance(workers, persistent):

    def make():
        loader = data.StatefulDataLoader(
            list(range(30)),
            3,
            sampler=PlacedSampler(30),
            num_workers=workers,
            persistent_workers=persistent,
        )
        assert isinstance(loader, torchdata.StatefulDataLoader)
        return loader

    world = World(make, 1)
    play(world, [("step",), ("fail", {0}), ("step",), ("resize", 2), ("step",), ("resize", 1)])
    play(world, [("step",)] * 9)
    assert world.used == expected(30, len(world.used))
    assert world.used[-1][0] == 1


def test_its_state_is_good_for_any_world():
    one, other = (data.StatefulDataLoader(range(10), 2) for _ in range(2))
    next(iter(one))
    one.committed()
    assert one.state_dict() == one.sampler.state_dict()
    other.load_state_dict(one.state_dict())
    assert next(iter(other)).tolist() == [2, 3]


@pytest.mark.parametrize("with_sampler", [False, True])
def test_a_state_with_the_loader_knows_what_each_step_used(tmp_path, with_sampler):
    sampler = data.ElasticSampler(12, shuffle=False)
    loader = data.StatefulDataLoader(range(12), 4, sampler=sampler)
    ledger = data.Ledger(tmp_path)
    parts = {"loader": loader} | ({"sampler": sampler} if with_sampler else {})
    state = TorchState(model=nn.Linear(1, 1), ledger=ledger, **parts)
    state.restore()
    for _ in loader:
        state.commit()
    ledger.close()
    lines = [
        json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()
    ]
    assert sorted(number for line in lines for number in line.get("ids", [])) == list(range(12))


def test_torchdatas_own_loader_goes_on_where_the_sampler_is():
    sampler = data.ElasticSampler(10, shuffle=False, rank=0, size=1)
    loader = torchdata.StatefulDataLoader(range(10), 2, sampler=sampler)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    sampler.took(2)
    sampler.committed()
    other = data.ElasticSampler(10, shuffle=False, rank=0, size=1)
    loader = torchdata.StatefulDataLoader(range(10), 2, sampler=other)
    other.load_state_dict(sampler.state_dict())
    assert next(iter(loader)).tolist() == [2, 3]
