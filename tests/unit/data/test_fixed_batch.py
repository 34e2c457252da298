"""`BatchPolicy.fixed`: the tree of additions, who runs what, and what samples weigh."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.fixed_batch import Assignment, SumTree, ranges, resume
from torchelastic.data.loader import DataLoader
from torchelastic.data.sampler import ElasticSampler
from torchelastic.errors import ConfigError

COUNTS = st.integers(1, 40)


def test_left_subtree_has_the_largest_power_of_two():
    up = SumTree(6).up
    assert up[0, 4] == ((4, 6), (0, 6))
    assert up[0, 2] == ((2, 4), (0, 4))
    assert up[4, 5] == ((5, 6), (4, 6))


@pytest.mark.parametrize(
    ("count", "held", "expected"),
    [
        (8, range(8), [(0, 8)]),
        (8, range(4), [(0, 4)]),
        (8, range(3), [(0, 2), (2, 3)]),
        (8, [1, 2, 3], [(1, 2), (2, 4)]),
        (6, [4, 5], [(4, 6)]),
        (6, [], []),
    ],
)
def test_subtrees_of_a_set_are_the_largest_complete_ones(count, held, expected):
    assert SumTree(count).subtrees(held) == expected


@examples(30)
@given(COUNTS, st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=7))
def test_ranges_cover_all_micro_batches_in_the_shortest_step(count, speeds):
    found = ranges(count, tuple(speeds))
    assert [number for one in found for number in one] == list(range(count))
    slowest = max(len(one) / speed for one, speed in zip(found, speeds, strict=True))
    # One more for anyone would be as slow, or slower.
    ideal = count / sum(speeds)
    assert slowest >= ideal - 1e-9
    assert slowest <= ideal + max(1 / speed for speed in speeds)


@pytest.mark.parametrize(
    ("count", "speeds", "lengths"),
    [
        (16, (1, 1, 1, 1), [4, 4, 4, 4]),
        (12, (1, 1, 1), [4, 4, 4]),
        (28, (1, 1, 1, 0.5), [8, 8, 8, 4]),
        (3, (1, 1, 1, 1, 1), [1, 1, 1, 0, 0]),
    ],
)
def test_ranges_follow_speeds_and_subtrees(count, speeds, lengths):
    assert [len(one) for one in ranges(count, tuple(map(float, speeds)))] == lengths


@pytest.mark.parametrize("size", range(1, 7))
def test_a_worker_of_up_to_six_sends_at_most_two_subtrees_of_sixteen(size):
    tree = SumTree(16)
    assert max(len(tree.subtrees(one)) for one in ranges(16, (1.0,) * size)) <= 2


@examples(50)
@given(st.data(), st.integers(1, 20), st.integers(1, 5))
def test_interrupted_step_runs_each_micro_batch_that_nobody_holds_once(data, count, size):
    sets = st.sets(st.integers(0, 24))
    held = [data.draw(sets) for _ in range(size)]
    kept, again = resume(count, held)
    numbers = [one for part in (*kept, *again) for one in part]
    assert sorted(numbers) == list(range(count))
    assert all(own <= mine for own, mine in zip(kept, held, strict=True))


def test_micro_batch_held_twice_counts_for_the_lower_rank():
    assert resume(4, [{0, 1}, {1, 2}]) == Assignment([{0, 1}, {2}], [[3], []])
    # The sum of the second rank has the first micro-batch in it, so it is not used at all.
    assert resume(4, [{0}, {0, 1}]) == Assignment([{0}, set()], [[1, 2], [3]])


@examples(30)
@given(COUNTS, st.integers(1, 9), st.integers(1, 6), st.data())
def test_shares_and_weights_add_up_at_the_end_of_an_epoch_too(count, micro, size, data):
    policy = BatchPolicy.fixed(micro=micro, count=count)
    total = data.draw(st.integers(1, micro * count))
    assert sum(policy.shares(size, total)) == total
    cuts = [policy.cuts(rank, size, total) for rank in range(size)]
    assert sum(cut.scale for own in cuts for cut in own) == pytest.approx(1)
    for own, share in zip(cuts, policy.shares(size, total), strict=True):
        assert all(one.stop == other.start for one, other in pairwise(own))
        assert (own[-1].stop if own else 0) == share


def sharded(policy, readers):
    """The policy in a training whose replicas have as many workers that read different samples."""
    steps = SimpleNamespace(
        readers=readers, turn=0, speeds=lambda size: (1.0,) * size, resumed=lambda *_: None
    )
    policy.attach(steps)
    return policy


@examples(30)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(2, 3), st.integers(1, 3), st.data())
def test_replica_divides_the_samples_of_its_micro_batches(count, micro, readers, replicas, data):
    policy = sharded(BatchPolicy.fixed(micro=micro, count=count), readers)
    size, total = replicas * readers, data.draw(st.integers(1, micro * count))
    to_load = [policy.to_load(rank, size, total, is_next=True) for rank in range(size)]
    used = [one for own in to_load for span in own.credited for one in range(*span)]
    assert sorted(used) == list(range(total))
    every = policy.micro_batches_of(size, total)
    for rank, own in enumerate(to_load):
        slices = policy.cuts(rank, size, total)
        assert len(slices) == len(every[rank]) == len(every[rank - rank % readers])
        assert [cut.stop - cut.start for cut in slices] == [b - a for a, b in own.to_load]
        # What fully_shard divides by, and the samples: a placeholder weighs nothing.
        weights = [readers * (b - a) / total for a, b in own.credited]
        assert [cut.scale for cut in slices] == weights
        assert policy.shares(size, total)[rank] == sum(b - a for a, b in own.credited)


def test_world_with_a_part_of_a_replica_is_refused():
    policy = sharded(BatchPolicy.fixed(micro=2, count=4), readers=2)
    with pytest.raises(ConfigError, match="3 is not whole"):
        policy.shares(3)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_loaders_of_a_sharded_training_hand_out_each_sample_once(replicas):
    found, size = [], 2 * replicas
    for rank in range(size):
        policy = sharded(BatchPolicy.fixed(micro=2, count=3), readers=2)
        sampler = ElasticSampler(13, seed=1, rank=rank, size=size)
        loader = DataLoader(range(13), sampler=sampler, policy=policy)
        for batch in loader:
            slices = policy.cuts(rank, size, loader.total)
            assert len(batch) == max(slices[-1].stop if slices else 0, 1)
            assert set(loader.handed.ids) <= set(batch.tolist())
            found += loader.handed.ids
    assert sorted(found) == list(range(13))


@pytest.mark.parametrize("settings", [{"micro": 0}, {"count": 0}, {"shares": "some"}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        BatchPolicy.fixed(**{"micro": 1, "count": 1, **settings})


def test_policy_without_a_state_says_what_to_do():
    policy = BatchPolicy.fixed(micro=2, count=2)
    with pytest.raises(ConfigError, match=r"TorchState\(policy=policy\)"):
        policy.accumulate(torch.zeros(4), torch.nn.Linear(1, 1))
    for ask in (lambda: policy.weight(0, 1), lambda: policy.micro_batches(1)):
        with pytest.raises(ConfigError):
            ask()


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, sample):
        return sample + torch.rand(())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_augmentation_depends_on_the_sample_and_not_on_the_worker(size):
    found = {}
    for rank in range(size):
        before = torch.get_rng_state()
        sampler = ElasticSampler(12, seed=1, rank=rank, size=size)
        loader = DataLoader(
            Augmented(), sampler=sampler, policy=BatchPolicy.fixed(micro=2, count=3)
        )
        for batch in loader:
            found |= {int(one): float(one) for one in batch}
        assert torch.equal(torch.get_rng_state(), before), "the user's generator is as before"
    assert len(found) == 12
    reference = {}
    for batch in DataLoader(
        Augmented(),
        sampler=ElasticSampler(12, seed=1, rank=0, size=1),
        policy=BatchPolicy.fixed(micro=2, count=3),
    ):
        reference |= {int(one): float(one) for one in batch}
    assert found == reference
