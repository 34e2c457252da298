"""Streams: records known only by reading, each used once an epoch, in any history of worlds."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.test_loader import play
from tests.unit.data.worlds import PlacedStream, World, examples
from torchelastic.data import DataLoader, ElasticStream
from torchelastic.data.progress import Position
from torchelastic.data.streaming import records_from
from torchelastic.errors import ConfigError
from torchelastic.tensors import tensor_tree


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
