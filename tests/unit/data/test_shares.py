"""Whose is what: tables, and the law that nothing is taken twice or never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.shares import Plan, Share, every_nth, turns_left
from torchelastic.errors import ConfigError

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


policies = st.one_of(
    st.builds(BatchPolicy.scale_with_world, st.integers(1, 5)),
    st.builds(BatchPolicy.constant_global, st.integers(1, 20)),
)


@examples(50)
@given(
    length=st.integers(0, 60),
    policy=policies,
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
