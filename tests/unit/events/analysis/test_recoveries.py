import pytest

from tests.unit.events.analysis.test_goodput import counted
from tests.unit.events.stories import Story, failure
from torchelastic.events import types as events
from torchelastic.events.analysis.recoveries import RECOVERIES_LIMIT, Recovery
from torchelastic.events.analysis.view import fold


def recoveries(story: Story) -> tuple[Recovery, ...]:
    return fold(story.records).recoveries


def split(recovery: Recovery) -> list[float | None]:
    parts = ("detect", "wait", "agree", "rebuild", "transfer", "redo")
    return [pytest.approx(getattr(recovery, part), abs=1e-5) for part in parts]


def ten_steps() -> Story:
    story = Story().world(0, 0).trains(1, 0, step=0)
    for step in range(1, 11):
        story.steps(1 + step, 0, step)
    return story


def test_the_cost_of_a_killed_worker_is_split():
    story = ten_steps().fails(11.5, 0).over(11.6, 0, reason="rank 2 was killed")
    story.world(11.8, 1, reason="rank 2 was killed; again")
    story.trains(12.8, 1, step=10, built=0.3, fetched=0.25)
    (one,) = recoveries(story.steps(13.8, 1, 11))
    # 0.6 s of the step in flight were lost.
    assert split(one) == [0.1, 0.0, 0.2, 0.75, 0.25, 0.6]
    assert one.cost == pytest.approx(1.9)
    assert (one.generation, one.kind, one.wall) == (0, "failure", 1011.6)
    assert (one.why, one.failure) == ("rank 2 was killed; again", failure().to_json())
    assert one.to_json()["is_failure"]
    assert one.done


def test_recovery_parts_not_reached_yet_are_unknown():
    assert recoveries(ten_steps().over(12, 0, "finished").end(13)) == ()
    story = ten_steps().fails(11.5, 0).over(11.6, 0)
    (one,) = recoveries(story)
    assert (one.agree, one.rebuild, one.redo, one.done) == (None, None, None, False)
    (one,) = recoveries(story.world(12, 1))
    assert one.agree == pytest.approx(0.4)
    assert not one.done


def test_steps_that_have_to_be_done_again_are_part_of_the_cost():
    story = ten_steps().fails(11.2, 0).over(11.2, 0).world(11.2, 1).trains(11.2, 1, step=4)
    (one,) = recoveries(story)
    assert one.redo == pytest.approx(6.2)


def test_a_silent_node_was_gone_when_its_step_should_have_been_done():
    story = (
        ten_steps().tell(15, events.NodeLost("b", "its lease ended")).over(15, 0, "node-failure")
    )
    (one,) = recoveries(story.world(15.5, 1, "a").trains(16, 1, step=10))
    assert one.detect == pytest.approx(3.0)  # step 10 was entered at 11
    assert one.failure is None


@pytest.mark.parametrize("peer_first", [False, True])
def test_a_hang_began_when_the_step_should_have_been_done_whoever_tells_first(peer_first):
    story = ten_steps().tell(71, events.WorkerKilled(2, 0, "it hangs"), by="b")
    if peer_first:
        story.fails(71.05, 0, by="a", node="a", rank=0, message="lost a peer")
    story.fails(71.1, 0).over(71.2, 0).world(71.3, 1)
    (one,) = recoveries(story)
    assert one.detect == pytest.approx(59.2)


def test_redo_without_reported_steps_is_unknown():
    story = Story().world(0, 0).workers_start(0.1, 0).fails(9, 0).over(9, 0)
    (one,) = recoveries(story.world(9.1, 1).workers_start(9.2, 1))
    assert one.done
    assert one.redo is None


@pytest.mark.parametrize("told", [True, False], ids=["its first step", "nothing but the start"])
def test_a_hang_in_the_first_step_is_no_work_that_has_to_be_done_again(told):
    story = Story().world(0, 0).trains(1, 0, step=0)
    if told:
        story.steps(2, 0, 0, entered=1)
    story.tell(31, events.WorkerKilled(2, 0, "it hangs"), by="b")
    story.fails(31.1, 0).over(31.2, 0).world(31.3, 1).trains(31.4, 1, step=0)
    (one,) = recoveries(story.steps(32, 1, 1))
    assert split(one)[0] == 30.2
    assert one.redo == 0.0
    assert fold(story.records).goodput.micros["other"] == 30_200_000


@pytest.mark.parametrize(
    ("told", "formed", "wait", "agree"),
    [
        ([(12, False), (72, False)], 80, 68, 1),
        ([(12, True), (13, False), (15, True), (16, False), (17, True)], 20, 2 + 1, 6),
    ],
)
def test_waiting_for_a_node_is_told_apart_until_enough_are_there(told, formed, wait, agree):
    story = ten_steps().tell(11, events.NodeLost("b", "silence")).over(11, 0, "node-failure")
    for at, enough in told:
        story.tell(at, events.Waiting(2, ["b"], "", enough=enough), generation=0)
    (one,) = recoveries(story.world(formed, 1))
    assert (one.wait, one.agree) == (pytest.approx(wait), pytest.approx(agree))


def test_a_resize_is_no_failure_and_takes_no_time_to_detect():
    story = ten_steps().tell(11.2, events.WorldChanging("c joins"), generation=0)
    story.world(11.5, 1, "abc").trains(12, 1, step=11, fetched=0.1)
    (one,) = recoveries(story)
    assert (one.kind, one.why, one.to_json()["is_failure"]) == ("resize", "c joins", False)
    assert split(one) == [0.0, 0.0, 0.0, 0.4, 0.1, 0.0]
    assert fold(story.records).last_recovery is None


def test_a_change_whose_leader_was_not_heard():
    story = ten_steps().fails(11.5, 0).world(12, 1, reason="rank 2 failed")
    (one,) = recoveries(story)
    assert (one.kind, one.is_failure, one.why) == ("unknown", True, "rank 2 failed")


def test_a_failure_that_was_none_after_all():
    """The connection that a peer lost was that of a node which had taken its leave."""
    story = ten_steps().fails(11.5, 0, by="a", node="a", rank=0, message="lost a peer: b")
    story.over(11.6, 0, reason="rank 0 lost a peer")
    assert recoveries(story)[0].is_failure
    story.tell(11.7, events.RestartDecided(True, "b leaves", "leave"), generation=1)
    (one,) = recoveries(story.world(11.8, 1, "a", reason="b leaves"))
    assert (one.kind, one.failure, one.why, one.is_failure) == ("leave", None, "b leaves", False)


def test_a_script_is_back_when_its_workers_run_or_when_it_steps():
    story = Story().world(0, 0).workers_start(1, 0).over(10, 0).world(11, 1).workers_start(12, 1)
    (one,) = recoveries(story)
    assert (one.rebuild, one.transfer) == (1.0, 0.0)
    (one,) = recoveries(story.steps(16, 1, 3, stalls={"restore": 2.0}))
    assert (one.rebuild, one.transfer) == (3.0, 2.0)


def test_the_last_recoveries_are_kept():
    story = ten_steps()
    for generation in range(RECOVERIES_LIMIT + 5):
        at = 20.0 + generation
        story.fails(at, generation).over(at, generation)
        story.world(at + 0.5, generation + 1).trains(at + 0.75, generation + 1, step=10)
    found = recoveries(story)
    assert [one.generation for one in found] == list(range(5, RECOVERIES_LIMIT + 5))
    assert all(one.done and one.rebuild == pytest.approx(0.25) for one in found)
    totals = fold(story.records).recovery_totals
    assert (totals.changes, totals.failures) == (RECOVERIES_LIMIT + 5, RECOVERIES_LIMIT + 5)
    dropped = totals.failures_cost - sum(one.cost for one in found)
    assert dropped >= 5 * (0.5 + 0.25)


@pytest.mark.parametrize("fell", [True, False])
def test_recovery_whose_next_world_fails_before_training_is_done_then(fell):
    """It does not say `the job ended` when the job has finished three worlds later."""
    story = ten_steps().over(12, 0).world(13, 1)
    if fell:
        story.fails(15, 1)
    story.over(16, 1).world(17, 2).trains(18, 2, step=10)
    first, second = recoveries(story.over(30, 2, "finished").end(31))
    assert (first.done, first.rebuild) == (True, 2.0 if fell else 3.0)
    assert (second.done, second.detect, second.rebuild) == (True, 1.0 if fell else 0.0, 1.0)


def test_recovery_into_a_world_that_finishes_unseen_is_done():
    [one] = recoveries(ten_steps().over(12, 0).world(13, 1).end(20))
    assert one.done


@pytest.mark.parametrize(("before", "redo"), [(6, 4.5), (0, None)])
def test_redo_of_a_plain_script_comes_from_its_optimizer_or_is_unknown(before, redo):
    story = counted(0, 0, 10, 0).over(15.5, 0).world(20, 1).workers_start(20, 1)
    [begun] = fold(story.records).recoveries
    assert (begun.done, begun.redo) == (True, None), "nor before it has taken a step"
    [done] = fold(counted(1, 20, 5, before, story).records).recoveries
    assert done.redo == redo
    assert done.rebuild == 6.0, "to the first step that was seen"
