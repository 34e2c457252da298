"""What the orders of an agent, in the order they come, let a training thread do next."""

from typing import NamedTuple

import pytest

from tests.unit.worker.entering import enter
from torchelastic.errors import ChannelLost, JobClosed
from torchelastic.training.gate import GateDecision
from torchelastic.training.inbox import Inbox
from torchelastic.worker.orders import Ask, Closed, Entered, Leave, Order, Over, Through


@pytest.fixture
def inbox():
    return Inbox()


def in_world(inbox, generation, step):
    """Enter the world, and a step of it."""
    inbox.take(enter(generation))
    assert inbox.next(None) == enter(generation)
    gate = inbox.gate(generation)
    assert gate.enter(step)
    return gate


def test_a_question_is_answered_at_once_also_before_the_world_is_entered(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(enter(1))
    for _ in range(2):
        assert inbox.take(Ask(0)) == Entered(0, 5)
        assert not gate.enter(6)
    assert inbox.take(Ask(1)) == Entered(1, -1)


def test_the_size_of_the_next_world_is_known_until_it_is_entered_or_void(inbox):
    in_world(inbox, 0, 5)
    assert inbox.next_size == 0
    inbox.take(enter(1, after=5))
    assert inbox.next_size == 1
    inbox.take(Over(0, "lost"))
    assert inbox.next_size == 0


@pytest.mark.parametrize("order", [Ask(6), Ask(8), Through(6, 0), Over(6)])
def test_what_is_of_another_generation_changes_nothing(inbox, order):
    gate = in_world(inbox, 7, 3)
    assert inbox.take(order) is None
    assert gate.enter(4)
    assert inbox.next(None) is None


class Next(NamedTuple):
    """The training thread, whose world broke or did not, is to do this."""

    order: Order | None
    broken: int | None = None


#: Orders, worlds that the training thread has left at a boundary, and what it does next.
STORIES = {
    "to the next world by agreement":
        [Ask(0), enter(1, after=6), 0, Next(enter(1, after=6))],
    "stop and wait for a world":
        [Ask(0), Through(0, 5), 0, Next(None), enter(1), Next(enter(1))],
    "a failure voids what was agreed":
        [enter(1, after=6), Over(1, "lost"), Next(Over(1, "lost"), 0), Next(None, 0),
         enter(2), Next(enter(2), 0)],
    "a world that was to follow one that is over is not entered":
        [enter(1, after=6), Over(0), Next(Over(0), 0), Next(None, 0)],
    "a worker whose world broke waits until it is over":
        [enter(1, after=6), Next(None, 0), Over(1), enter(2), Next(Over(1), 0), Next(enter(2), 0)],
    "every over is answered once":
        [Over(0), Next(Over(0), 0), Over(0), Next(None, 0), Over(1), Next(Over(1))],
    "a world said twice or late is not entered again":
        [enter(0), Next(None), 0, enter(3), Next(enter(3)), enter(2), Next(None)],
    "leaving comes after everything else":
        [Leave(15), Over(0), enter(1), Next(Over(0), 0), Next(enter(1), 0), 1, Next(Leave(15))],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_a_worker_in_step_5_of_the_first_world_does_next(inbox, story):
    in_world(inbox, 0, 5)
    for event in story:
        match event:
            case Next(order, broken):
                assert inbox.next(broken) == order
            case int(generation):
                inbox.left(generation)
            case order:
                inbox.take(order)


@pytest.mark.parametrize(
    ("orders", "verdicts"),
    [
        ([Ask(0), enter(1, after=6)], {6: GateDecision.GO, 7: GateDecision.STOP}),
        ([Ask(0), Through(0, 5)], {6: GateDecision.STOP}),
        ([enter(1, after=6), Over(1)], {6: GateDecision.OVER}),
    ],
)
def test_where_a_worker_in_step_5_of_the_first_world_stops(inbox, orders, verdicts):
    gate = in_world(inbox, 0, 5)
    for order in orders:
        inbox.take(order)
    assert {step: gate.decision(step) for step in verdicts} == verdicts
    assert inbox.is_over(0) is (GateDecision.OVER in verdicts.values())


def test_a_newcomer_enters_at_once_whatever_the_others_have_agreed_on(inbox):
    inbox.take(enter(1, after=6))
    assert inbox.next(None) == enter(1, after=6)
    assert inbox.gate(1).enter(7)


def test_over_before_the_world_was_entered(inbox):
    inbox.take(enter(3))
    world = inbox.next(None)
    inbox.take(Over(3))
    assert inbox.gate(world.generation).decision(0) is GateDecision.OVER
    assert inbox.is_over(3)


@pytest.mark.parametrize(("through", "aborts"), [(None, True), (4, True), (5, False), (6, False)])
def test_at_the_end_of_the_training_the_last_step_is_run_to_its_end(inbox, through, aborts):
    gate = in_world(inbox, 0, 5)
    inbox.take(Over(0, "done", finished=True, through=through))
    assert inbox.is_over(0) is aborts
    assert gate.decision((through or 5) + 1) is (GateDecision.OVER if aborts else GateDecision.STOP)
    assert inbox.next(None).finished


def test_the_job_is_closed(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(Closed("The budget is spent."))
    inbox.close(ChannelLost("The agent is gone."))
    assert isinstance(inbox.closed, JobClosed)
    assert gate.decision(6) is GateDecision.OVER
    assert inbox.is_over(0)
    assert inbox.reason == "The budget is spent."
