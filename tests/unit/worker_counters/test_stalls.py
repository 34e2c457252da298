"""Stalls: what is said is counted, kind by kind."""

import time

import pytest

from torchelastic.worker_counters import stalls


@pytest.fixture(autouse=True)
def afresh():
    before = list(stalls.seconds)
    yield
    stalls.seconds[:] = type(stalls.seconds)("d", before)


def counted() -> dict[str, float]:
    return dict(zip(stalls.COUNTED, stalls.seconds, strict=True))


def test_seconds_are_added_to_their_kind_and_no_other():
    before = counted()
    stalls.add("data", 1.5)
    stalls.add("data", 0.25)
    stalls.add("restore", 3.0)
    after = {kind: seconds - before[kind] for kind, seconds in counted().items()}
    assert {kind: more for kind, more in after.items() if more} == {"data": 1.75, "restore": 3.0}
    with pytest.raises(KeyError):
        stalls.add("coffee", 1.0)


def test_stall_is_counted_if_block_fails(monkeypatch):
    times = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    before = counted()["checkpoint"]
    with stalls.Counted("checkpoint"):
        pass
    with pytest.raises(KeyError), stalls.Counted("checkpoint"):
        raise KeyError
    assert counted()["checkpoint"] - before == 3.0


def test_all_but_data_is_apart_from_what_a_worker_does_itself():
    each = [float(2**place) for place in range(len(stalls.COUNTED))]
    assert stalls.apart(each) == sum(each) - each[stalls.COUNTED.index("data")]
