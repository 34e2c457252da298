"""The loader: worlds change, steps are undone, and the loop of the user notices nothing."""

import re
from array import array
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from tests.unit.data.worlds import PlacedSampler, World, sampled
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, checker
from torchelastic.data.order import Order
from torchelastic.data.own_rank import OwnRank
from torchelastic.errors import ConfigError
from torchelastic.worker_counters import stalls


def play(world, events):
    for name, *arguments in events:
        getattr(world, name)(*arguments)


def expected(length, steps_of):
    """The first so many of all epochs, in their order."""
    return [
        (epoch, sample)
        for epoch in range(steps_of // max(1, length) + 1)
        for sample in Order(length, 0, epoch).at(0, length)
    ][:steps_of]


@pytest.mark.parametrize("persistent", [True, False])
def test_loader_keeps_samples_loaded_in_advance(persistent):
    loader = sampled(60, batch_size=3, num_workers=1, persistent_workers=persistent)
    world = World(loader, 1)
    play(world, [("step",), ("fail", {0}), ("step",), ("resize", 2), ("step",), ("resize", 1)])
    play(world, [("step",)] * 20)
    assert world.used == expected(60, len(world.used))
    assert world.used[-1][0] == 1


def test_the_end_of_an_epoch_is_seen_by_who_comes_after_it():
    loader = sampled(4, batch_size=2)()
    sampler = loader.sampler
    for _ in loader:
        sampler.committed()
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert sampler.state_dict()["consumed"] == 4
    newcomer = sampled(4, batch_size=2)()
    newcomer.sampler.load_state_dict(sampler.state_dict())
    assert newcomer.sampler.epoch == 0
    assert list(newcomer) == []
    assert [batch.tolist() for batch in newcomer] == [batch.tolist() for batch in loader]


def test_an_iterator_that_has_ended_goes_on_when_its_last_step_is_undone():
    loader = sampled(4, batch_size=2)()
    batches = iter(loader)
    first, last = next(batches), None
    loader.sampler.committed()
    state = loader.sampler.state_dict()
    last = next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    loader.sampler.load_state_dict(state)
    assert next(batches).tolist() == last.tolist() != first.tolist()


def test_epochs_by_set_epoch_as_with_torch():
    loader = sampled(4, batch_size=2)()
    seen = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        seen.append([sample for batch in loader for sample in batch.tolist()])
    assert seen == [Order(4, 0, epoch).at(0, 4) for epoch in range(3)]


def test_a_jump_to_another_epoch():
    loader = sampled(4, batch_size=2)()
    batches = iter(loader)
    next(batches)
    loader.sampler.set_epoch(5)
    assert next(batches).tolist() == Order(4, 0, 5).at(0, 2)


def test_unequal_shares_have_weights_and_an_empty_one_a_sample_that_counts_for_nothing():
    loaders = [sampled(7, batch_size=2)() for _ in range(3)]
    for rank, loader in enumerate(loaders):
        loader.sampler.here = OwnRank(rank, 3)
    batches = [list(loader) for loader in loaders]
    order = Order(7, 0, 0).at(0, 7)
    assert [each[-1].tolist() for each in batches] == [[order[6]]] * 3
    assert [loader.weight for loader in loaders] == [3.0, 0.0, 0.0]
    assert [loader.total for loader in loaders] == [1, 1, 1]
    assert [len(loader.handed.ids) for loader in loaders] == [1, 0, 0]


def test_drop_last_may_be_said_to_either():
    dropping = DataLoader(range(7), 2, sampler=PlacedSampler(7), drop_last=True)
    for loader in (sampled(7, batch_size=2, drop_last=True)(), dropping):
        assert len(loader) == len(list(loader)) == 3


def test_an_error_of_the_dataset_loses_no_sample():
    class Fails(list):
        failed = False

        def __getitem__(self, index):
            if not self.failed:
                self.failed = True
                raise OSError("the disk was away for a moment")
            return super().__getitem__(index)

    loader = DataLoader(Fails(range(6)), 2, sampler=PlacedSampler(6))
    batches = iter(loader)
    with pytest.raises(OSError, match="away"):
        next(batches)
    assert [sample for batch in batches for sample in batch.tolist()] == Order(6, 0, 0).at(0, 6)


def test_the_global_random_numbers_are_left_alone():
    """Else a step that is done again, with a new iterator, would draw others."""
    before = torch.get_rng_state()
    loader = DataLoader(range(6), 2, sampler=PlacedSampler(6))
    list(loader), list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator()
    assert DataLoader(range(6), 2, sampler=PlacedSampler(6), generator=generator).generator is (
        generator
    )


def test_loader_has_the_attributes_frameworks_use():
    sampler = ElasticSampler(6, rank=0, size=1)
    loader = DataLoader(range(6), 2, sampler=sampler, collate_fn=tuple)
    assert (loader.sampler, loader.batch_size, len(loader)) == (sampler, 2, 3)
    assert DataLoader(range(5)).batch_size == 1
    assert isinstance(next(iter(loader)), tuple)
    assert DataLoader(range(6), shuffle=True).sampler.shuffle
    assert not DataLoader(range(6)).sampler.shuffle


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sampler": [[0]]}, "pass batch_size or policy"),
        ({"batch_size": None}, "needs batch_size or policy"),
        ({"batch_size": 2, "policy": BatchPolicy.constant_global(4)}, "batch_size or policy"),
        ({"in_order": False}, "in_order"),
        ({"sampler": DistributedSampler(range(4), 1, 0)}, "DistributedSampler"),
        ({"sampler": ElasticSampler(4), "shuffle": True}, "to the sampler"),
        ({"dataset": Endless()}, "ElasticStream"),
    ],
)
def test_loader_refuses_invalid_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DataLoader(**{"dataset": range(4)} | arguments)


def test_there_is_no_weight_before_the_first_batch():
    with pytest.raises(RuntimeError, match="has not returned a batch"):
        _ = DataLoader(range(4)).weight


class Slow(list):
    """Takes a second for a sample, by the clock it is given."""

    def __init__(self, clock):
        super().__init__(range(2))
        self.clock = clock

    def __getitem__(self, index):
        self.clock[0] += 1.0
        return super().__getitem__(index)


def test_waiting_for_a_batch_is_counted_and_nothing_else(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("torchelastic.data.loader.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(stalls, "seconds", array("d", [0.0] * len(stalls.KINDS)))
    batches = iter(DataLoader(Slow(clock), batch_size=1))
    next(batches)
    clock[0] += 100.0  # a step
    assert list(stalls.seconds) == [1.0, 0.0, 0.0, 0.0]
    assert len(list(batches)) == 1
    assert list(stalls.seconds) == [2.0, 0.0, 0.0, 0.0]


# --- the guide ------------------------------------------------------------------------------------


DOCS = Path(__file__).parents[3] / "docs/guides"


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("page", ["batch-policy.md", "data.md"])
def test_examples_run(elsewhere, page):
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


def test_the_checker_says_what_the_page_shows(elsewhere, capsys):
    exec("\n".join(blocks("ledger.md", "python")), {})
    (shown,) = blocks("ledger.md", "console")
    command, _, output = shown.partition("\n")
    assert checker.main(command.split()[4:]) == 0
    assert capsys.readouterr().out == output
    (line,) = blocks("ledger.md", "json")
    assert isinstance(checker.parse(line.encode()), checker.Line)
