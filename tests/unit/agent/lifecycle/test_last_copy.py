"""Who may be killed when its world is over, and who is waited for."""

import pytest

from torchelastic.agent.lifecycle.last_copy import LiveCopy, is_usable, may_be_killed

OVER = 4
FREE = LiveCopy(generation=OVER, step=7, stopped=True)
FROZEN = LiveCopy(generation=OVER, step=7, frozen=True)


@pytest.mark.parametrize(
    ("copy", "usable"),
    [
        (FREE, True),
        (LiveCopy(generation=OVER, step=0, stopped=True), True),
        (LiveCopy(generation=OVER, step=7), False),
        (LiveCopy(generation=OVER, step=7, stopped=True, frozen=True), False),
        (LiveCopy(generation=OVER, step=7, stopped=True, doomed=True), False),
        (LiveCopy(generation=OVER, step=None, stopped=True), False),
        (LiveCopy(generation=OVER + 1, step=7), True),
        (LiveCopy(generation=OVER + 1, step=None), False),
        (LiveCopy(generation=OVER - 1, step=7, stopped=True), False),
        (LiveCopy(generation=-1, step=None), False),
    ],
    ids=[
        "it has stopped",
        "before the first step",
        "it has not stopped yet",
        "frozen since",
        "about to be killed",
        "it came to that world and got no state",
        "it trains in a later world",
        "on the way into a later world",
        "it was left behind in an earlier world",
        "a replacement",
    ],
)
def test_from_which_copies_the_next_world_can_go_on(copy, usable):
    assert is_usable(copy, OVER) is usable


@pytest.mark.parametrize(
    ("own", "others", "elsewhere", "waited", "killed"),
    [
        (FROZEN, [], False, 0.1, False),
        (FROZEN, [FROZEN, FROZEN], False, 0.1, False),
        (FROZEN, [LiveCopy(generation=-1, step=None)], False, 0.1, False),
        (FROZEN, [FROZEN, FREE], False, 0.1, True),
        (FROZEN, [FROZEN], True, 0.1, True),
        (FROZEN, [], False, 60.0, True),
        (LiveCopy(generation=OVER, step=0, frozen=True), [], False, 0.1, True),
        (LiveCopy(generation=OVER, step=None, frozen=True), [], False, 0.1, True),
    ],
    ids=[
        "alone",
        "all are frozen",
        "beside a replacement",
        "another one here is free",
        "another one elsewhere is free",
        "its time is up",
        "no step was taken",
        "it has no state",
    ],
)
def test_who_is_killed_when_its_world_is_over(own, others, elsewhere, waited, killed):
    found = may_be_killed(own, others, elsewhere=elsewhere, waited=waited, limit=60.0)
    assert found is killed
