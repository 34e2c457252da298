"""Which of several controllers acts."""

import pytest

from torchelastic.cluster.operator import leader_lease
from torchelastic.cluster.operator.leader_lease import Seen, given_up, may_take, seen, taken


def lease(holder="a", version="1"):
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
    return {"metadata": {"resourceVersion": version}, "spec": spec}


@pytest.mark.parametrize(
    ("holder", "age", "allowed"),
    [("a", 0, True), ("b", 0, False), ("b", 14.9, False), ("b", 15, True), ("", 0, True)],
)
def test_a_lease_is_taken_when_nobody_renews_it(holder, age, allowed):
    last = Seen(version="1", since=100.0)
    assert may_take(lease(holder), "a", last, 100.0 + age) is allowed


def test_a_renewal_starts_the_time_anew():
    first = seen(lease(version="1"), None, 100.0)
    assert seen(lease(version="1"), first, 110.0).since == 100.0
    assert seen(lease(version="2"), first, 110.0).since == 110.0


def test_who_takes_it_writes_that_down():
    renewed = taken(taken({}, "a", 0.0), "a", 5.0)["spec"]
    assert renewed["acquireTime"] == "1970-01-01T00:00:00.000000Z"
    assert renewed["renewTime"] == "1970-01-01T00:00:05.000000Z"
    assert renewed["leaseTransitions"] == 0
    other = taken(lease("a"), "b", 9.0)
    assert other["spec"]["leaseTransitions"] == 1
    assert may_take(given_up(other), "c", Seen(version="1", since=0.0), 0.0)


def test_a_leader_stops_before_another_begins():
    assert leader_lease.ACT_FOR + 4 < leader_lease.DURATION
