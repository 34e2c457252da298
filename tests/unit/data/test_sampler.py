"""Where the samples of a rank come from: the order, sampler, streams, and torchdata's loader."""

import itertools
import json
import math
import pickle
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchdata import stateful_dataloader as torchdata

from tests.unit.data.test_loader import expected, play
from tests.unit.data.worlds import PlacedSampler, PlacedStream, World, examples
from torchelastic import TorchState, data
from torchelastic.data import DataLoader, ElasticSampler, ElasticStream
from torchelastic.data import order as order_module
from torchelastic.data.order import Order
from torchelastic.data.own_rank import own_rank
from torchelastic.data.progress import IN_FLIGHT_LIMIT, DataProgress, Handed, Position
from torchelastic.data.streaming import records_from
from torchelastic.errors import ConfigError
from torchelastic.tensors import tensor_tree


def sampler_of(length=10, rank=0, size=1, **options):
    return ElasticSampler(length, rank=rank, size=size, **options)


def test_its_state_is_plain_and_good_for_any_world():
    sampler = sampler_of(seed=3)
    sampler.took(4)
    assert sampler.state_dict() == {
        "length": 10,
        "shuffle": True,
        "seed": 3,
        "epoch": 0,
        "consumed": 0,
    }
    sampler.committed()
    other = sampler_of(rank=1, size=2)
    other.load_state_dict(sampler.state_dict())
    assert (other.seed, other.consumed) == (3, 4)
    assert list(other) == Order(10, 3, 0).at(4, 10)[1::2]
    tensor_tree.check("sampler", sampler)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: sampler_of(rank=2, size=2), "rank 2 is not in a world of size 2"),
        (lambda: ElasticSampler(10, rank=1), "both rank and size"),
        (lambda: sampler_of().took(-1), "-1"),
        (lambda: loaded(length=11), "saved with length=11"),
        (lambda: loaded(shuffle=False), "saved with shuffle=False"),
    ],
)
def test_sampler_refuses_invalid_arguments(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def loaded(**other):
    """One that goes on with the state of other data."""
    sampler = ElasticSampler(range(10))
    sampler.load_state_dict(sampler.state_dict() | other)


def test_under_torchs_own_loader_as_distributed_sampler():
    samplers = [sampler_of(rank=rank, size=2, seed=1) for rank in range(2)]
    loaders = [torch.utils.data.DataLoader(range(10), 2, sampler=one) for one in samplers]
    steps = list(zip(*loaders, strict=True))
    order = Order(10, 1, 0).at(0, 10)
    assert [sorted(first.tolist() + second.tolist()) for first, second in steps] == [
        sorted(order[:4]),
        sorted(order[4:8]),
        sorted(order[8:]),
    ]


def test_the_end_is_filled_up_or_dropped():
    assert [len(list(sampler_of(5, rank, 2))) for rank in (0, 1)] == [3, 3]
    assert [len(sampler_of(5, rank, 2)) for rank in (0, 1)] == [3, 3]
    assert len(list(sampler_of(5, 0, 2, drop_last=True))) == 2


def test_every_commit_is_told_what_was_taken():
    sampler = sampler_of()
    sampler.committed()  # a step without this data
    assert sampler.state_dict()["consumed"] == 0
    samples = iter(sampler)
    for consumed in (1, 2):
        next(samples)
        with pytest.raises(ConfigError, match=r"does not know how many.*call sampler"):
            sampler.committed()
        sampler.took(1)
        sampler.committed()
        assert sampler.state_dict()["consumed"] == consumed


def test_no_more_is_taken_than_there_is():
    sampler = sampler_of()
    sampler.took(8)
    sampler.took(8)
    assert sampler.consumed == 10
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10


def test_a_plain_iterator_does_not_go_on_at_the_wrong_place():
    sampler = sampler_of()
    samples = iter(sampler)
    next(samples)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="create a new iterator"):
        next(samples)


def test_an_epoch_is_not_silently_empty():
    sampler = sampler_of(4, shuffle=False)
    loader = torch.utils.data.DataLoader(range(4), 2, sampler=sampler)
    for _ in loader:
        sampler.took(2)
        sampler.committed()
    with pytest.raises(ConfigError, match=r"Epoch 0 has no samples left.*sampler.set_epoch"):
        list(loader)
    other = sampler_of(4, shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == []  # who goes on there finds nothing left, once
    sampler.set_epoch(1)
    assert len(list(loader)) == 2


# --- the own rank ---------------------------------------------------------------------------------


def test_said_or_of_the_process_group_or_of_the_environment_or_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert own_rank() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert own_rank() == (2, 3)
    assert own_rank(1, 2) == (1, 2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert own_rank() == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((2, 2), "rank 2 is not in a world of size 2"),
        ((-1, 2), "is not in a world"),
        ((0, 0), "is not in a world"),
        ((1, None), "both rank and size"),
    ],
)
def test_no_such_rank(given, told):
    with pytest.raises(ConfigError, match=told):
        own_rank(*given)


# --- progress -------------------------------------------------------------------------------------


def progress():
    return DataProgress(seed=0, shuffle=True, rank=0, size=1)


def hand_out(one, begin, end, epoch=0):
    one.hand_out(Handed(epoch, 0, 1, (begin, end), (begin,)), Position(epoch, end))


def test_handed_out_is_not_committed():
    one = progress()
    hand_out(one, 0, 2)
    hand_out(one, 2, 4)
    assert (one.consumed, one.state_dict()["consumed"]) == (4, 0)
    one.committed()
    assert (one.consumed, one.state_dict()["consumed"]) == (4, 4)
    assert [handed.span for handed in one.latest] == [(0, 2), (2, 4)]
    one.committed()
    assert one.latest == ()


def test_progress_load_forgets_samples_handed_out():
    one = progress()
    state = one.state_dict()
    hand_out(one, 0, 4)
    turn = one.turn
    one.load_state_dict(state)
    assert (one.position, one.turn) == (Position(), turn + 1)
    hand_out(one, 0, 2)
    one.committed()
    assert [handed.span for handed in one.latest] == [(0, 2)]


def test_progress_without_commits_is_bounded():
    one = progress()
    for step in range(IN_FLIGHT_LIMIT + 5):
        hand_out(one, step, step + 1)
    one.committed()
    assert len(one.latest) == IN_FLIGHT_LIMIT


def test_the_end_of_an_epoch_is_no_jump_but_another_epoch_is():
    one = progress()
    one.end_epoch()
    assert (one.epoch, one.turn) == (1, 0)
    one.set_epoch(1)
    assert one.turn == 0
    one.set_epoch(4)
    assert (one.position, one.turn) == (Position(4), 1)


def test_weights():
    assert Handed(0, 1, 3, (0, 7), (1, 2)).weight == 3 * 2 / 7
    assert Handed(0, 2, 3, (0, 1), ()).weight == 0.0


# --- the order of an epoch: a permutation, the same everywhere, and as good as a random one -------


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 81, 100, 2999])
def test_each_sample_has_one_position(length):
    for seed, epoch in itertools.product((-5, 0, 1 << 70), (0, 9)):
        assert sorted(Order(length, seed, epoch).at(0, length)) == list(range(length))


def test_order_is_pinned():
    """A job that goes on with another release must go on in the same order."""
    assert Order(10, 0, 0).at(0, 10) == [9, 2, 1, 3, 4, 0, 6, 7, 8, 5]
    assert Order(10**9, 7, 3).at(123_456_789, 123_456_793) == [
        324917963,
        308934402,
        134780555,
        819707533,
    ]


def test_order_depends_on_seed_epoch_and_window():
    orders = [Order(50, *key).at(0, 50) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]]
    assert len(set(map(tuple, orders))) == len(orders)


def test_parts_of_it_fit_together(monkeypatch):
    whole = Order(1000, 3, 0).at(0, 1000)
    monkeypatch.setattr(order_module, "_BLOCK", 64)
    order = Order(1000, 3, 0)
    for start, stop in [(0, 1000), (63, 65), (999, 1000), (10, 10), (500, 700), (0, 64)]:
        assert order.at(start, stop) == whole[start:stop]


def test_a_thousand_million_samples_take_no_memory():
    order = Order(10**9, 0, 0)
    assert len(set(order.at(0, 1000) + order.at(10**9 - 1000, 10**9))) == 2000
    assert len(order._block) <= order_module._BLOCK


def test_positions_outside_are_refused():
    with pytest.raises(IndexError):
        Order(5, 0).at(3, 6)
    with pytest.raises(ValueError, match="2\\*\\*60"):
        Order(-1, 0)


def spread(observed, expected, freedom):
    """By how many standard deviations chi-square is off what chance gives."""
    chi = sum((count - expected) ** 2 / expected for count in observed)
    return (chi - freedom) / math.sqrt(2 * freedom)


def test_all_permutations_come_equally_often():
    counts = Counter(tuple(Order(3, seed, 0).at(0, 3)) for seed in range(300))
    observed = [counts[one] for one in itertools.permutations(range(3))]
    assert abs(spread(observed, 300 / 6, 5)) < 4


@pytest.mark.parametrize("length", [1000, 65536 + 7])
def test_order_positions_are_uniform(length):
    """Both where a sample is put, and which come after each other, as in a random order."""
    samples = torch.tensor(Order(length, 5, 2).at(0, length))
    positions = torch.arange(length)
    cells = (samples * 10 // length) * 10 + positions * 10 // length
    assert abs(spread(cells.bincount(minlength=100).tolist(), length / 100, 81)) < 4
    steps = (samples[1:] - samples[:-1]) % length
    observed = (steps * 20 // length).bincount(minlength=20).tolist()
    assert abs(spread(observed, (length - 1) / 20, 19)) < 4
    correlation = torch.corrcoef(torch.stack([samples, positions]).double())[0, 1]
    assert abs(correlation.item()) < 4 / math.sqrt(length)


def test_epochs_are_not_alike():
    """No sample is at the same place, or near it, in two epochs more often than by chance."""
    length = 10_000
    first, second = (torch.tensor(Order(length, 0, epoch).at(0, length)) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert abs(torch.corrcoef(torch.stack([first, second]).double())[0, 1].item()) < 0.04


# --- streams: records known only by reading, each used once an epoch, in any history of worlds ----


def content(shard, number):
    return 1000 * shard + number


def reader(lengths):
    """Reads shards of these lengths; nobody is told them."""

    def read(shard, first):
        return (content(shard, number) for number in range(first, lengths[shard]))

    return read


def streamed(lengths, *, window=4, drop_last=False, decode=None, **options):
    def make():
        stream = PlacedStream(reader(lengths), len(lengths), window=window, decode=decode)
        stream.drop_last = drop_last
        return DataLoader(stream, **options)

    return make


def whole(lengths, epochs, window=4):
    """All records of some epochs in their order."""
    stream = ElasticStream(reader(lengths), len(lengths), window=window)
    return [
        (epoch, (record.shard, record.number))
        for epoch in range(epochs)
        for record in records_from(stream, 0, Position(epoch))
    ]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    window=st.integers(1, 12),
    epoch=st.integers(0, 2),
)
@examples(10)
def test_all_records_are_there_and_one_can_go_on_behind_any(lengths, window, epoch):
    stream = ElasticStream(reader(lengths), len(lengths), window=window)
    records = list(records_from(stream, 7, Position(epoch)))
    found = sorted((record.shard, record.number) for record in records)
    assert found == [(at, number) for at, length in enumerate(lengths) for number in range(length)]
    for index, record in enumerate(records):
        assert list(records_from(stream, 7, record.after)) == records[index + 1 :]


def test_shards_and_windows_are_shuffled():
    lengths = [20] * 10
    first, second = whole(lengths, 2)[:200], whole(lengths, 2)[200:]
    assert [one for _, one in first] != [one for _, one in second]
    assert len({shard for _, (shard, _) in first[:20]}) == 1
    assert [number for _, (_, number) in first[:20]] != list(range(20))


def test_without_shuffling_they_come_as_they_are():
    stream = ElasticStream(["ab", "", "c"], shuffle=False)
    assert [batch for batch in DataLoader(stream, 2, collate_fn="".join)] == ["ab", "c"]


def test_with_loading_processes():
    lengths = [7, 0, 5, 9]
    loader = streamed(lengths, batch_size=2, num_workers=2, persistent_workers=True)
    world = World(loader, 1)
    play(world, [("step",), ("fail", {0}), ("step",), ("resize", 2), ("step",), ("resize", 1)])
    play(world, [("step",)] * 12)
    assert world.used == whole(lengths, 2)[: len(world.used)]
    assert world.used[-1][0] == 1


def test_only_records_of_this_rank_are_decoded():
    decoded = []

    def decode(record):
        decoded.append(record)
        return record

    world = World(streamed([8], window=1, batch_size=2, decode=decode), 2)
    list(world.workers[0].loader)
    assert decoded == [content(0, number) for number in (0, 1, 4, 5)]


def test_the_end_may_be_dropped():
    (worker,) = World(streamed([5], batch_size=2, drop_last=True), 1).workers
    assert len(list(worker.loader)) == 2
    assert worker.data.epoch == 1


def test_an_error_while_reading_is_not_the_end():
    failures = iter([True, False])

    def read(shard, first):
        yield from range(first, 2)
        if next(failures, False):
            raise OSError("the network was away for a moment")
        yield from range(max(first, 2), 6)

    stream = ElasticStream(read, 1, shuffle=False, rank=0, size=1)
    batches = iter(DataLoader(stream, 2, collate_fn=tuple))
    assert next(batches) == (0, 1)
    with pytest.raises(OSError, match="away"):
        next(batches)
    assert list(batches) == [(2, 3), (4, 5)]


def test_its_state_is_plain():
    (worker,) = World(streamed([3, 3], batch_size=2), 1).workers
    worker.take()
    worker.data.committed()
    tensor_tree.check("stream", worker.data)
    assert worker.data.state_dict() == {
        "shards": 2,
        "shuffle": True,
        "window": 4,
        "seed": 0,
        "epoch": 0,
        "consumed": 2,
        "shard": 0,
        "offset": 0,
    }


def test_loading_processes_may_be_spawned():
    """What they are sent is pickled: no open file may be in it."""
    stream = ElasticStream([range(4)], shuffle=False, rank=0, size=1)
    loader = DataLoader(stream, 2, collate_fn=tuple)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader.dataset))
    assert copy._begun is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ElasticStream(reader([1])), "the number of shards"),
        (lambda: ElasticStream([[1]], 2), "the list has 1 shards"),
        (lambda: ElasticStream([[1]], window=0), "window is 0"),
        (lambda: DataLoader(ElasticStream([[1]]), shuffle=True), "its own order"),
        (
            lambda: ElasticStream([[1]]).load_state_dict(ElasticStream([[1], [2]]).state_dict()),
            "shards=2",
        ),
    ],
)
def test_stream_refuses_invalid_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# --- the same loader as torchdata's, and torchdata's own with our sampler -------------------------


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
