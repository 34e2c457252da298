"""Stalls: what is said is counted, kind by kind."""

import time

import pytest

from torchelastic import stalls


@pytest.fixture(autouse=True)
def afresh():
    before = list(stalls.seconds)
    yield
    stalls.seconds[:] = type(stalls.seconds)("d", before)


def counted() -> dict[str, float]:
    return dict(zip(stalls.KINDS, stalls.seconds, strict=True))


def test_seconds_are_added_to_their_kind_and_no_other():
    before = counted()
    stalls.add("data", 1.5)
    stalls.add("data", 0.25)
    stalls.add("restore", 3.0)
    after = {kind: seconds - before[kind] for kind, seconds in counted().items()}
    assert after == {"data": 1.75, "checkpoint": 0.0, "snapshot": 0.0, "restore": 3.0}


def test_what_is_done_inside_is_counted_also_if_it_fails(monkeypatch):
    times = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    before = counted()["checkpoint"]
    with stalls.Counted("checkpoint"):
        pass
    with pytest.raises(KeyError), stalls.Counted("checkpoint"):
        raise KeyError
    assert counted()["checkpoint"] - before == 3.0


def test_an_unknown_kind_is_an_error_of_ours():
    with pytest.raises(KeyError):
        stalls.add("coffee", 1.0)
