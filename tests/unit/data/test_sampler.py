"""The sampler's state, and the sampler alone under torch's own loader."""

import pytest
import torch.distributed as dist
import torch.utils.data

from torchelastic.data import ElasticSampler
from torchelastic.data.order import Order
from torchelastic.data.own_rank import own_rank
from torchelastic.data.progress import IN_FLIGHT_LIMIT, DataProgress, Handed, Position
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
