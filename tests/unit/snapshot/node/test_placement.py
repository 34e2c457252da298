"""Who holds whose replicas."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.snapshot.node import snapshot_service
from torchelastic.snapshot.node.snapshot_service import holders

WORLDS = st.lists(st.integers(0, 99).map("n{}".format), min_size=1, max_size=16, unique=True)


def all_pairs(nodes, replicas):
    return {(node, holder) for node in nodes for holder in holders(nodes, node, replicas)}


def test_doctests_hold():
    assert doctest.testmod(snapshot_service).failed == 0


def test_who_is_in_no_world_has_no_holders():
    assert holders(["a", "b"], "c", 1) == ()
    assert holders(["a", "b"], "a", 0) == ()


@given(WORLDS, st.integers(0, 5))
def test_each_has_so_many_others_and_holds_for_as_many(nodes, replicas):
    wanted = min(replicas, len(nodes) - 1)
    pairs = all_pairs(nodes, replicas)
    for node in nodes:
        mine = holders(nodes, node, replicas)
        assert len(set(mine)) == len(mine) == wanted
        assert node not in mine
        assert sum(holder == node for _, holder in pairs) == wanted


@given(WORLDS, st.integers(1, 3), st.data())
def test_the_loss_of_a_node_moves_only_what_it_held(nodes, replicas, data):
    lost = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != lost]
    before, after = all_pairs(nodes, replicas), all_pairs(left, replicas)
    new = after - before
    held_by_lost = {node for node, holder in before if holder == lost}
    assert {node for node, _ in new} <= held_by_lost
    assert len(new) <= len(held_by_lost)


@given(WORLDS, st.integers(1, 3))
def test_a_newcomer_moves_only_what_comes_to_it_and_what_it_brings(nodes, replicas):
    new = all_pairs([*nodes, "newcomer"], replicas) - all_pairs(nodes, replicas)
    assert all("newcomer" in pair for pair in new)
    assert len(new) <= 2 * replicas
