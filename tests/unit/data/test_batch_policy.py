"""Who takes how many samples of a step, in worlds of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy, MicroBatchSlice
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
def test_what_makes_no_sense_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()
