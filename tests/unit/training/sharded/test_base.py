"""The version that a world of replicas goes on from."""

import pytest

from torchelastic.training.state import FIRST, TORN, base_of, missing_parts

OLD, NEW = (4, 10), (4, 11)


@pytest.mark.parametrize(
    ("versions", "ready", "replica", "base"),
    [
        pytest.param([FIRST] * 4, "....", 2, FIRST, id="nobody has trained"),
        pytest.param([NEW] * 4, "....", 2, NEW, id="all have committed"),
        pytest.param([NEW, NEW, FIRST, FIRST], "....", 2, NEW, id="a replica is new"),
        pytest.param([NEW, FIRST, FIRST, NEW], "....", 2, NEW, id="parts of two replicas"),
        pytest.param([OLD, OLD, NEW, NEW], "....", 2, NEW, id="a replica was interrupted"),
        pytest.param([NEW, OLD, NEW, FIRST], ".r..", 2, NEW, id="one part can be completed"),
        pytest.param([OLD, OLD, OLD, OLD], "r.rr", 2, OLD, id="nobody has committed"),
        pytest.param([OLD, OLD, (5, 11), (5, 11)], "nn..", 2, (5, 11), id="the next generation"),
        pytest.param([(5, 11), OLD], ".n", 2, (5, 11), id="its first step, completed"),
        pytest.param([(5, 11), OLD], ".r", 2, TORN, id="another step"),
        pytest.param([NEW, OLD, NEW, OLD], "....", 2, TORN, id="a part is behind, and not ready"),
        pytest.param([NEW, FIRST], "..", 2, TORN, id="a part is lost"),
        pytest.param([TORN, NEW, TORN, NEW], "....", 2, TORN, id="a part is torn"),
        pytest.param([TORN] * 2, "..", 2, TORN, id="all are torn"),
        pytest.param([(-1, 30), (-1, 30), NEW, FIRST], "....", 2, (-1, 30), id="a checkpoint"),
        pytest.param([OLD, NEW], "..", 1, NEW, id="replicas of one"),
    ],
)
def test_the_freshest_version_that_is_whole(versions, ready, replica, base):
    """`r`: the worker can complete its next step, of generation 4; `n`: of generation 5."""
    assert base_of(versions, [{"r": 4, "n": 5}.get(one, -1) for one in ready], replica) == base


def test_the_parts_of_the_freshest_version_that_are_lost():
    assert missing_parts([NEW, FIRST, FIRST, OLD], NEW, 2) == [1]
    assert missing_parts([NEW, NEW, OLD], NEW, 2) == []
