"""What the orders of an agent, in the order they come, let a training thread do next."""

import pytest

from tests.unit.worker.entering import enter
from torchelastic.errors import ChannelLost, JobClosed
from torchelastic.training.gate import Verdict
from torchelastic.training.inbox import Inbox
from torchelastic.worker.orders import Ask, Closed, Entered, Leave, Over, Through


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


def test_nothing_to_do(inbox):
    assert inbox.next(None) is None


def test_a_question_is_answered_at_once(inbox):
    in_world(inbox, 0, 5)
    assert inbox.take(Ask(0)) == Entered(0, 5)
    assert inbox.take(Ask(0)) == Entered(0, 5)


def test_a_question_before_the_world_is_entered(inbox):
    inbox.take(enter(0))
    assert inbox.take(Ask(0)) == Entered(0, -1)


@pytest.mark.parametrize("order", [Ask(6), Ask(8), Through(6, 0), Over(6)])
def test_what_is_of_another_generation_changes_nothing(inbox, order):
    gate = in_world(inbox, 7, 3)
    assert inbox.take(order) is None
    assert gate.enter(4)
    assert inbox.next(None) is None


def test_to_the_next_world_by_agreement(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(Ask(0))
    inbox.take(enter(1, after=6))
    assert gate.verdict(6) is Verdict.GO
    assert gate.verdict(7) is Verdict.STOP
    inbox.left(0)
    assert inbox.next(None) == enter(1, after=6)
    assert inbox.gate(1).enter(7)


def test_a_newcomer_enters_at_once_whatever_the_others_have_agreed_on(inbox):
    inbox.take(enter(1, after=6))
    assert inbox.next(None) == enter(1, after=6)
    assert inbox.gate(1).enter(7)


def test_stop_and_wait_for_a_world(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(Ask(0))
    inbox.take(Through(0, 5))
    assert gate.verdict(6) is Verdict.STOP
    inbox.left(0)
    assert inbox.next(None) is None
    inbox.take(enter(1))
    assert inbox.next(None) == enter(1)


def test_a_failure_voids_what_was_agreed(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(enter(1, after=6))
    inbox.take(Over(1, "lost"))
    assert gate.verdict(6) is Verdict.OVER
    assert inbox.is_over(0)
    assert inbox.next(0) == Over(1, "lost")
    assert inbox.next(0) is None
    inbox.take(enter(2))
    assert inbox.next(0) == enter(2)


def test_a_world_that_was_to_follow_one_that_is_over_is_not_entered(inbox):
    in_world(inbox, 0, 5)
    inbox.take(enter(1, after=6))
    inbox.take(Over(0))
    inbox.next(0)
    assert inbox.next(0) is None


def test_a_worker_whose_world_broke_waits_until_it_is_over(inbox):
    in_world(inbox, 0, 5)
    inbox.take(enter(1, after=6))
    assert inbox.next(broken=0) is None
    inbox.take(Over(1))
    inbox.take(enter(2))
    assert inbox.next(broken=0) == Over(1)
    assert inbox.next(broken=0) == enter(2)


def test_over_before_the_world_was_entered(inbox):
    inbox.take(enter(3))
    world = inbox.next(None)
    inbox.take(Over(3))
    assert inbox.gate(world.generation).verdict(0) is Verdict.OVER
    assert inbox.is_over(3)


def test_every_over_is_answered_once(inbox):
    in_world(inbox, 0, 0)
    inbox.take(Over(0))
    inbox.take(Over(0))
    assert inbox.next(0) == Over(0)
    assert inbox.next(0) is None
    inbox.take(Over(1))
    assert inbox.next(None) == Over(1)


def test_a_world_said_twice_or_late_is_not_entered_again(inbox):
    in_world(inbox, 3, 0)
    inbox.take(enter(3))
    inbox.take(enter(2))
    assert inbox.next(None) is None


def test_the_end_of_the_training(inbox):
    in_world(inbox, 0, 5)
    inbox.take(Over(0, "done", finished=True))
    assert inbox.is_over(0)
    assert inbox.next(0).finished


@pytest.mark.parametrize(("through", "aborts"), [(4, True), (5, False), (6, False)])
def test_at_the_end_of_the_training_the_last_step_is_run_to_its_end(inbox, through, aborts):
    gate = in_world(inbox, 0, 5)
    inbox.take(Over(0, "done", finished=True, through=through))
    assert inbox.is_over(0) is aborts
    assert gate.verdict(through + 1) is (Verdict.OVER if aborts else Verdict.STOP)
    assert inbox.next(None).finished


def test_leaving_comes_after_everything_else(inbox):
    in_world(inbox, 0, 5)
    inbox.take(Leave(15))
    inbox.take(Over(0))
    inbox.take(enter(1))
    assert inbox.next(0) == Over(0)
    assert inbox.next(0) == enter(1)
    inbox.left(1)
    assert inbox.next(None) == Leave(15)


def test_the_job_is_closed(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(Closed("The budget is spent."))
    inbox.close(ChannelLost("The agent is gone."))
    assert isinstance(inbox.closed, JobClosed)
    assert gate.verdict(6) is Verdict.OVER
    assert inbox.is_over(0)
    assert inbox.reason == "The budget is spent."
