"""`expires`: what it asks its client for, and when."""

import math
import time
from pathlib import Path

import pytest

from torchelastic import timer
from torchelastic.timer import countdown, expires


class Kept(timer.TimerClient):
    def __init__(self):
        self.said = []

    def acquire(self, scope_id, expiration_time):
        self.said.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id):
        self.said.append(("release", scope_id))


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(countdown, "_configured", None)
    return Kept()


def test_a_block_has_a_timer_as_long_as_it_runs(client):
    before = time.time()
    with expires(after=10, scope="load", client=client):
        ((what, scope, at),) = client.said
    assert (what, scope) == ("acquire", "load")
    assert before + 10 <= at <= time.time() + 10
    assert client.said[1:] == [("release", "load")]
    with pytest.raises(KeyError), expires(10, "load", client):
        raise KeyError
    assert client.said[3:] == [("release", "load")]


def test_the_scope_is_the_place_by_default(client):
    with expires(after=10, client=client):
        pass
    assert client.said[0][1] == f"{__file__}#{line_of('with expires(after=10, client=client):')}"


def test_a_configured_client_is_taken_unless_another_one_is_given(client):
    timer.configure(client)
    with expires(after=10, scope="all"):
        pass
    own = Kept()
    with expires(after=10, scope="one", client=own):
        pass
    assert [said[1] for said in client.said] == ["all", "all"]
    assert [said[1] for said in own.said] == ["one", "one"]


def test_a_function_has_a_timer_for_every_call_of_it(client):
    @expires(after=10, client=client)
    def count(depth):
        """Down."""
        return count(depth - 1) + 1 if depth else 0

    assert count(2) == 2
    assert count.__doc__ == "Down."
    assert [said[0] for said in client.said] == ["acquire"] * 3 + ["release"] * 3
    assert client.said[0][1].endswith(f"#{line_of('@expires(after=10, client=client)')}")


def test_without_anybody_to_look_after_it_there_is_no_timer(client):
    with (
        pytest.raises(RuntimeError, match=r"`torchelastic run`, or call torchelastic\.timer\.conf"),
        expires(after=10),
    ):
        raise AssertionError("not reached")


def test_what_is_no_time_is_refused(client):
    for after in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be a number of seconds above 0"):
            expires(after, client=client)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)
