"""Who takes how many samples of a step, in worlds of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy, MicroBatchSlice
from torchelastic.data.shares import Plan, Share, every_nth, turns_left
from torchelastic.errors import ConfigError

SIZES = st.integers(1, 97)
MICROS = st.none() | st.integers(1, 40)


@st.composite
def policies(draw):
    micro = draw(MICROS)
    if draw(st.booleans()):
        return BatchPolicy.constant_global(draw(st.integers(1, 500)), micro=micro)
    return BatchPolicy.scale_with_world(draw(st.integers(1, 40)), micro=micro)


#: Whatever may be left at the end of an epoch.
REMAINDERS = st.none() | st.integers(1, 500)


@pytest.mark.parametrize(
    ("batch", "size", "shares"),
    [
        (8, 1, (8,)),
        (8, 2, (4, 4)),
        (8, 3, (3, 3, 2)),
        (8, 7, (2, 1, 1, 1, 1, 1, 1)),
        (3, 5, (1, 1, 1, 0, 0)),
        (256, 3, (86, 85, 85)),
    ],
)
def test_the_global_batch_is_shared_out_evenly(batch, size, shares):
    policy = BatchPolicy.constant_global(batch)
    assert policy.batch(size) == batch
    assert policy.shares(size) == policy.shares(size, batch) == shares


@pytest.mark.parametrize(
    ("batch", "micro", "size", "count"),
    [(256, None, 1, 1), (256, 32, 1, 8), (256, 32, 3, 3), (256, 32, 8, 1), (257, 32, 8, 2)],
)
def test_shares_are_cut_into_micro_batches(batch, micro, size, count):
    assert BatchPolicy.constant_global(batch, micro=micro).micro_batches(size) == count


def test_a_rank_with_fewer_samples_than_micro_batches_has_empty_ones():
    policy = BatchPolicy.constant_global(7, micro=1)
    assert policy.cuts(0, 4) == (MicroBatchSlice(0, 1, 4 / 7), MicroBatchSlice(1, 2, 4 / 7))
    assert policy.cuts(3, 4) == (MicroBatchSlice(0, 1, 4 / 7), MicroBatchSlice(1, 1, 0.0))
    assert policy.cuts(4, 5, batch=3) == (MicroBatchSlice(0, 0, 0.0),)


@examples(50)
@given(policies(), SIZES, REMAINDERS)
def test_shares_add_up_and_every_sample_weighs_the_same(policy, size, batch):
    total = batch or policy.batch(size)
    shares = policy.shares(size, batch)
    assert len(shares) == size
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    count = policy.micro_batches(size, batch)
    for rank, share in enumerate(shares):
        cuts = policy.cuts(rank, size, batch)
        assert len(cuts) == count
        assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
        assert cuts[-1].stop == share
        assert all(cut.stop - cut.start <= (policy.micro or share) for cut in cuts)
        assert policy.weight(rank, size, batch) == pytest.approx(share * size / total)
        for cut in cuts:
            assert cut.scale == pytest.approx((cut.stop - cut.start) * size / total)


def test_the_batch_grows_with_the_world():
    policy = BatchPolicy.scale_with_world(32)
    assert [policy.batch(size) for size in (1, 3, 5)] == [32, 96, 160]
    assert policy.shares(3) == (32, 32, 32)


@pytest.mark.parametrize(
    ("rule", "base_size", "factors"),
    [
        ("linear", 1, {1: 1.0, 4: 4.0}),
        ("linear", 4, {1: 0.25, 4: 1.0, 6: 1.5}),
        ("sqrt", 1, {1: 1.0, 4: 2.0, 9: 3.0}),
        (lambda ratio: 1 + ratio, 2, {2: 2.0, 6: 4.0}),
    ],
)
def test_the_learning_rate_follows_the_batch(rule, base_size, factors):
    policy = BatchPolicy.scale_with_world(8, lr_rule=rule, base_size=base_size)
    assert {size: policy.lr_factor(size) for size in factors} == factors
    assert BatchPolicy.constant_global(8).lr_factor(5) == 1.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BatchPolicy.constant_global(0), "The batch is 0"),
        (lambda: BatchPolicy.constant_global(8, micro=0), "micro is 0"),
        (lambda: BatchPolicy.scale_with_world(0), "per_rank is 0"),
        (lambda: BatchPolicy.scale_with_world(8, base_size=0), "base_size is 0"),
        (lambda: BatchPolicy.scale_with_world(8, lr_rule="cubic"), "linear, sqrt, or a function"),
        (lambda: BatchPolicy.constant_global(8).shares(0), "The size of a world is 0"),
        (lambda: BatchPolicy.constant_global(8).shares(2, 0), "The batch is 0"),
    ],
)
def test_policy_refuses_invalid_arguments(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


# --- shares ---------------------------------------------------------------------------------------


EACH_2 = BatchPolicy.scale_with_world(2)
ALL_5 = BatchPolicy.constant_global(5)


@pytest.mark.parametrize(
    ("policy", "position", "length", "size", "drop_last", "spans"),
    [
        (EACH_2, 0, 8, 2, False, [(0, 2, 4), (4, 6, 8)]),
        (EACH_2, 0, 7, 2, False, [(0, 2, 4), (4, 6, 7)]),
        (EACH_2, 0, 7, 2, True, [(0, 2, 4)]),
        (EACH_2, 3, 4, 2, False, [(3, 4, 4)]),
        (EACH_2, 4, 4, 2, False, []),
        (EACH_2, 0, 0, 2, False, []),
        (ALL_5, 0, 11, 2, False, [(0, 3, 5), (5, 8, 10), (10, 11, 11)]),
        (ALL_5, 0, 11, 2, True, [(0, 3, 5), (5, 8, 10)]),
    ],
)
def test_the_steps_of_two_ranks(policy, position, length, size, drop_last, spans):
    first, second = (Plan(position, length, rank, size, policy, drop_last) for rank in range(size))
    assert list(first) == [Share(begin, middle, begin, end) for begin, middle, end in spans]
    assert list(second) == [Share(middle, end, begin, end) for begin, middle, end in spans]
    assert len(first) == len(spans)


class Own(BatchPolicy):
    """A policy of a user's own, with mistakes."""

    def __init__(self, batch, *shares):
        self._samples, self._shares = batch, shares

    def batch(self, size):
        return self._samples

    def shares(self, size, batch=None):
        return self._shares


@pytest.mark.parametrize("policy", [Own(0), Own(4, 4), Own(4, 2, 1), Own(4, 5, -1)])
def test_a_policy_that_loses_samples_is_refused(policy):
    with pytest.raises(ConfigError, match=r"policy\."):
        list(Plan(0, 10, 0, 2, policy))


any_policy = st.one_of(
    st.builds(BatchPolicy.scale_with_world, st.integers(1, 5)),
    st.builds(BatchPolicy.constant_global, st.integers(1, 20)),
)


@examples(50)
@given(
    length=st.integers(0, 60),
    policy=any_policy,
    worlds=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4)), max_size=6),
)
def test_in_any_sequence_of_worlds_each_position_is_taken_once(length, policy, worlds):
    """`worlds` are sizes, and how many steps each of them commits."""
    taken, position = [], 0
    for size, steps in [*worlds, (3, length)]:
        plans = [list(Plan(position, length, rank, size, policy)) for rank in range(size)]
        for shares in list(zip(*plans, strict=True))[:steps]:
            taken += [at for share in shares for at in range(share.start, share.stop)]
            position = shares[0].end
            assert {share[2:] for share in shares} == {shares[0][2:]}
    assert taken == list(range(length))


@pytest.mark.parametrize(
    ("position", "length", "drop_last", "ranks"),
    [
        (0, 6, False, [[0, 2, 4], [1, 3, 5]]),
        (0, 5, False, [[0, 2, 4], [1, 3, 0]]),
        (0, 5, True, [[0, 2], [1, 3]]),
        (4, 5, False, [[4], [4]]),
        (5, 5, False, [[], []]),
    ],
)
def test_in_turns(position, length, drop_last, ranks):
    found = [list(every_nth(position, length, rank, 2, drop_last=drop_last)) for rank in (0, 1)]
    assert found == ranks
    assert turns_left(position, length, 2, drop_last=drop_last) == len(ranks[0])
