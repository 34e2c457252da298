from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.support import SOAK
from tests.unit.events.stories import LOGS, Story
from torchelastic.events import types as events
from torchelastic.events.analysis.goodput import PARTS, GoodputFold, goodput


def seconds(story: Story) -> dict[str, float]:
    """The parts that are not nothing."""
    found = goodput(story.records)
    return {part: micros / 1e6 for part, micros in found.micros.items() if micros}


def stepping(upto: int) -> Story:
    """A second for each step, from the beginning."""
    story = Story().world(0, 0).trains(0, 0, step=0)
    for step in range(1, upto + 1):
        story.steps(step, 0, step)
    return story


def undisturbed() -> Story:
    """Ten steps of a second each, after a start of 5 s."""
    story = Story().world(2, 0).workers_start(2.5, 0).trains(5, 0, step=0, built=0.5, fetched=0.25)
    for step in range(1, 10):
        story.steps(5 + step, 0, step)
    return story.over(15, 0, "finished").end(16)


def test_a_run_without_any_failure():
    assert seconds(undisturbed()) == {
        "startup": 2 + 2.25,  # until the first world, and until the script called `train`
        "rendezvous": 0.5,
        "restore": 0.25,
        "productive": 10.0,
        "other": 1.0,  # the end
    }
    found = goodput(undisturbed().records)
    assert (found.disruptions, found.redone_steps, found.steps_known) == (0, 0, True)
    assert found.ratio == 10 / 16
    nothing = goodput([])
    assert (nothing.total, nothing.ratio, nothing.active_nodes) == (0.0, None, None)


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        pytest.param([(4, "skip")], 1.0, id="skipped"),
        pytest.param([(4, "retry")], 2 / 3, id="repeated"),
        pytest.param([(4, "retry"), (4, "skip")], 4 / 3, id="repeated, then skipped"),
        pytest.param([(6, "skip")], 0.0, id="not over yet"),
    ],
)
def test_goodput_of_bad_steps_is_not_training(told, lost):
    """Steps 4 and 5 are seen together, after 2 s; each of two ranks reports."""
    story = stepping(3)
    for step, action in told:
        for rank in range(2):
            bad = events.StepSkipped(rank, step, "bad", "nan", None, 0.0, True, action)
            story.tell(4.5, bad, generation=0)
    found = seconds(story.steps(5, 0, 5))
    assert found["productive"] == pytest.approx(5 - lost, abs=1e-5)
    assert found.get("skipped", 0.0) == pytest.approx(lost, abs=1e-5)


def exits(story: Story, at: float, exiting: float, *, by: str = "a") -> Story:
    return story.tell(at, events.WorkerExited(0, 0, 1, 0, exiting), by=by, generation=0)


def test_to_end_the_processes_after_the_programs_have_returned_is_no_training():
    story = stepping(5)
    exits(story, 7, 1.5, by="b")  # the last program returns at 6
    exits(story, 9, 3.0)
    assert seconds(story.over(9, 0, "finished").end(10)) == {"productive": 6.0, "other": 4.0}
    unseen = exits(Story().world(1, 0).workers_start(2, 0), 20, 4.0).over(20, 0, "finished")
    assert seconds(unseen.end(21)) == {"startup": 2.0, "unknown": 14.0, "other": 5.0}


def test_a_program_that_returned_before_a_failure_does_not_end_the_training():
    story = exits(stepping(5), 6, 1.0).fails(7, 0).over(7, 0)
    assert seconds(story) == {"productive": 5.0, "redone": 1.0, "other": 1.0}


def test_first_steps_slower_than_usual_count_as_startup():
    story = Story().world(0, 0).trains(1, 0, step=0)
    story.steps(4, 0, 1)  # 3 s, where the later ones take 0.5
    story.steps(5, 0, 3).steps(6, 0, 5)
    assert seconds(story) == {"startup": 1 + 2.5, "productive": 2.5}


def test_the_step_in_flight_is_lost_with_a_failure_and_no_more():
    story = stepping(5)
    story.fails(5.3, 0).over(5.4, 0).world(5.5, 1).trains(5.8, 1, step=5, built=0.1, fetched=0.2)
    story.steps(6.8, 1, 6).steps(7.8, 1, 7)
    found = seconds(story)
    assert found["redone"] == pytest.approx(0.4)
    assert found["rendezvous"] == pytest.approx(0.1 + 0.1)
    assert found["restore"] == pytest.approx(0.2)
    assert found["productive"] == pytest.approx(7.0)
    assert goodput(story.records).disruptions == 1


def test_a_hang_is_no_redone_work():
    found = seconds(stepping(3).over(63, 0).world(64, 1))
    assert (found["redone"], found["other"], found["rendezvous"]) == (1.0, 59.0, 1.0)


@pytest.mark.parametrize("kind", ["stop", "leave", "finished"])
def test_goodput_hang_that_no_failure_ended_is_not_training(kind):
    """54 s, of which 3 were steps."""
    found = seconds(stepping(3).over(54, 0, kind).end(54))
    assert found == {"productive": 4.0, "other": 50.0}


@pytest.mark.parametrize(
    ("waited", "training"),
    [(9, 9), (11, 1)],  # of a step that takes a second
)
def test_goodput_step_in_flight_of_a_live_job_is_hanging_when_overdue(waited, training):
    fold = GoodputFold()
    for record in stepping(5).records:
        fold.feed(record)
    found = fold.at(100 + 5 + waited)
    assert (found.productive, found.parts["other"]) == (5 + training, waited - training)


def test_goodput_long_step_that_is_done_and_rare_samples_are_training():
    story = stepping(3).steps(63, 0, 4)  # an evaluation
    assert seconds(story) == {"productive": 63.0}
    rare = Story().world(0, 0).trains(0, 0, step=0)
    for step in (100, 200, 300):
        rare.steps(step / 4, 0, step)
    fold = GoodputFold()
    for record in rare.records:
        fold.feed(record)
    assert fold.at(100 + 75 + 40).productive == 75 + 40


def test_steps_beyond_the_base_of_the_next_world_are_redone():
    story = stepping(10).over(10.5, 0).world(11, 1).trains(12, 1, step=4).steps(13, 1, 5)
    found = seconds(story)
    assert found["redone"] == pytest.approx(6 + 0.5)
    assert found["productive"] == pytest.approx(4 + 1)
    assert goodput(story.records).redone_steps == 6
    assert goodput(story.records).total == pytest.approx(13)


def test_a_roll_back_over_several_generations():
    story = stepping(10).over(10, 0, "resize").world(10, 1).trains(10, 1, step=11)
    for step in range(12, 20):
        story.steps(step - 1, 1, step)
    story.over(18, 1).world(18, 2).trains(18, 2, step=5)
    assert seconds(story) == {"productive": 5.0, "redone": 13.0}


def test_a_change_between_steps_loses_nothing():
    story = stepping(2).over(3, 0, "resize").world(3.5, 1).trains(4, 1, step=3)
    found = seconds(story)
    assert (found["productive"], found["rendezvous"]) == (3.0, 1.0)
    assert goodput(story.records).disruptions == 0


def test_the_last_sample_of_a_generation_may_come_after_its_end():
    found = seconds(stepping(2).over(5, 0).steps(5.1, 0, 4, entered=4.5).world(6, 1))
    assert (found["productive"], found["redone"]) == (4.5, 0.5)


@pytest.mark.parametrize(("base", "productive"), [(0, 0.0), (700, 3600.0)])
def test_a_generation_whose_steps_are_forgotten_has_trained_if_the_next_one_is_further(
    base, productive
):
    story = Story().world(0, 0).trains(0, 0, step=0).over(3600, 0).world(3600, 1)
    found = seconds(story.trains(3600, 1, step=base))
    assert found.get("productive", 0.0) == productive
    assert found.get("redone", 0.0) == 3600 - productive


def test_stalls_are_taken_out_of_training():
    story = Story().world(0, 0).trains(0, 0, step=0)
    story.steps(10, 0, 10, stalls={"data": 1.0, "checkpoint": 0.5, "snapshot": 0.25, "tea": 9.0})
    story.steps(20, 0, 20, stalls={"data": 1.5, "checkpoint": 0.5, "snapshot": 0.25})
    assert seconds(story) == {"productive": 17.75, "data": 1.5, "checkpoint": 0.75}


def test_stalls_of_workers_side_by_side_are_no_sum_and_the_slowest_node_counts():
    story = Story().world(0, 0).trains(0, 0, step=0)
    for node, stalled in (("a", 4.0), ("b", 6.0)):
        progress = events.Progress([0, 1], [10, 10], [110.0, 110.0], {"data": stalled})
        story.tell(10, progress, by=node, generation=0)
    story.steps(20, 0, 20)
    assert seconds(story) == {"productive": 17.0, "data": 3.0}


def test_waiting_for_nodes():
    story = Story().tell(2, events.Waiting(2, [], "1 of 2"), generation=0)
    story.tell(62, events.Waiting(2, [], "1 of 2"), generation=0).world(70, 0).trains(71, 0, step=0)
    story.steps(72, 0, 1).over(73, 0, "node-failure")
    story.tell(74, events.Waiting(2, ["b"], "1 of 2"), generation=0).world(80, 1)
    found = seconds(story)
    assert (found["startup"], found["waiting"], found["rendezvous"]) == (3.0, 68.0 + 6.0, 1.0)


def test_nodes_that_are_there_and_get_ready_are_not_waited_for():
    story = Story().tell(1, events.Waiting(2, [], "1 of 2"), generation=0)
    story.tell(2, events.Waiting(2, [], "warming up", enough=True), generation=0)
    story.tell(7, events.Waiting(2, [], "settling", enough=True), generation=0)
    story.world(9, 0).trains(9, 0, step=0).steps(10, 0, 1).over(20, 0)
    story.tell(21, events.Waiting(2, [], "warming up", enough=True), generation=0)
    story.tell(23, events.Waiting(2, ["b"], "1 of 2"), generation=0)
    story.tell(26, events.Waiting(2, [], "warming up", enough=True), generation=0)
    story.world(30, 1)
    found = seconds(story)
    assert (found["startup"], found["waiting"]) == (1.0 + 7.0, 1.0 + 3.0)
    assert found["rendezvous"] == 3.0 + 4.0


def test_a_world_that_was_not_heard_to_end_is_over_when_nodes_get_ready_for_the_next():
    story = Story(nodes="b").world(0, 0).trains(0, 0, step=0).steps(1, 0, 1).steps(2, 0, 2)
    story.tell(3, events.Waiting(2, [], "warming up", enough=True), generation=0).world(5, 1)
    found = seconds(story)
    assert (found["productive"], found["rendezvous"]) == (3.0, 2.0)


def without_steps() -> Story:
    """Two generations whose workers run for 48 s and 8 s."""
    story = Story().world(1, 0).workers_start(2, 0).over(50, 0).world(51, 1).workers_start(52, 1)
    return story.over(60, 1, "finished")


def test_goodput_without_a_step_is_unknown():
    story = without_steps().end(61)
    assert seconds(story) == {
        "startup": 2.0 + 1.0,
        "unknown": 48.0 + 8.0,
        "rendezvous": 1.0,
        "other": 1.0,
    }
    found = goodput(story.records)
    assert (found.steps_known, found.ratio, found.productive) == (False, None, 0.0)


def test_a_job_that_fell_again_and_again_without_a_step_has_not_trained():
    story = Story()
    for generation in range(60):
        at = 10 * generation
        story.world(at, generation).workers_start(at + 0.2, generation).over(at + 9.8, generation)
    fallen = goodput(story.records)
    assert (fallen.ratio, fallen.disruptions) == (None, 60)
    story.world(600, 60).workers_start(600, 60).steps(601, 60, 0).steps(602, 60, 1).steps(
        603, 60, 2
    )
    trains = goodput(story.records)
    assert trains.ratio == pytest.approx(2 / 603)
    assert trains.micros["unknown"] == 0, "who told no step before this one had not begun"


def counted(generation: int, at: int, steps: int, before: int, story: Story | None = None) -> Story:
    """The workers of a plain script start; five seconds later its optimizer has taken the first of
    so many steps of a second each, beyond those that it knows of before."""
    story = (story or Story()).world(at, generation).workers_start(at, generation)
    first = max(0, before)
    for step in range(1, steps + 1):
        story.steps(at + 5 + step, generation, first + step, before=before)
    return story


def test_steps_of_a_plain_script_are_counted_with_the_first_that_is_done_when_it_is_seen():
    story = counted(0, 0, 10, 0).over(15, 0, "finished").end(15)
    assert seconds(story) == {"startup": 5.0, "productive": 10.0}
    assert goodput(story.records).steps_known


#: What the optimizer says of steps before, in two generations of ten steps and of five. Then: steps
#: done again, a second each, beyond the one in flight; whether that is known; seconds of training.
RESTARTS = {
    "its state was loaded": (0, 6, 4, True, 11),
    "nothing was lost": (0, 10, 0, True, 15),
    "it went on from another job": (100, 106, 4, True, 11),
    "beyond what was seen": (0, 12, 0, True, 15),
    "it does not tell": (0, 0, 0, False, 15),
    # Then nobody knows how many steps there were before the first that was seen.
    "several were counted": (-1, 6, 0, False, 14),
    "several are counted": (0, -1, 0, False, 14),
}


@pytest.mark.parametrize(
    ("first", "second", "again", "known", "productive"), RESTARTS.values(), ids=RESTARTS
)
def test_redone_steps_of_a_restarted_script_come_from_its_optimizer(
    first, second, again, known, productive
):
    story = counted(0, 0, 10, first).over(15.5, 0)
    story = counted(1, 20, 5, second, story)
    found = goodput(story.records)
    assert (found.redone_steps, found.redone_known) == (again, known)
    assert seconds(story)["redone"] == pytest.approx(again + 0.5)
    assert seconds(story)["productive"] == pytest.approx(productive)
    assert found.total == 30


def test_redone_steps_unknown_once_stay_unknown():
    story = counted(0, 0, 10, 0).over(15, 0)
    story = counted(1, 20, 10, 0, story).over(35, 1)
    found = goodput(counted(2, 40, 5, 3, story).records)
    assert (found.redone_known, found.redone_steps, found.productive) == (False, 0, 25.0)


def test_a_script_that_tells_steps_starts_until_the_first_one():
    story = Story().world(1, 0).workers_start(2, 0)
    story.steps(12, 0, 0, stalls={"restore": 3.0}).steps(13, 0, 1).steps(14, 0, 2)
    assert seconds(story) == {"startup": 1 + 8.0, "restore": 3.0, "productive": 2.0}


def test_a_leader_that_was_never_heard_of_is_not_needed():
    """The log of a node that does not lead: no generation-over, one world after the other."""
    story = Story(nodes="b").world(1, 0).trains(2, 0, step=0).steps(3, 0, 1).steps(4, 0, 2)
    story.fails(4.5, 0).world(5, 1).trains(6, 1, step=2)
    found = goodput(story.records)
    assert (found.disruptions, found.total) == (1, 6.0)


def test_a_disruption_is_counted_once_in_whatever_order_it_is_reported():
    story = stepping(1)
    story.tell(2, events.WorkersStopped(0.1), by="b", generation=0).fails(2.1, 0).over(2.2, 0)
    assert goodput(story.over(2.3, 0).world(3, 1).records).disruptions == 1


def test_the_time_between_two_runs_is_waiting():
    story = undisturbed().tell(30, events.AgentStarted(1, "a:1", ["t.py"], 1, 2, 1))
    assert seconds(story)["waiting"] == 14.0


def test_goodput_ignores_records_after_the_end():
    late = undisturbed().steps(17, 0, 11).tell(99, events.Note("late"), by="c")
    assert goodput(late.records) == goodput(undisturbed().records)


def test_a_node_that_was_lost_does_not_keep_the_job_alive():
    story = Story().world(0, 0).trains(0, 0, step=0).tell(5, events.NodeLost("b", "silence"))
    story.over(5, 0, "node-failure").end(9, "a")
    assert seconds(story)["other"] == 4.0


def test_times_of_another_machine_are_laid_on_the_leaders_clock():
    story = Story().world(0, 0).trains(0, 0, step=0)
    for step in (2, 4, 6):
        progress = events.Progress([1], [step], [7000.0 + step])
        story.tell(step, progress, by="b", generation=0)
        there = story.records.pop()
        story.records.append(replace(there, mono=7000.0 + step, heard=100.0 + step))
    assert seconds(story) == {"productive": 6.0}


def test_node_efficiency_is_weighted_by_time():
    story = Story(most=4).world(0, 0).over(10, 0, "resize")
    story.tell(10, events.NodeJoined("c")).world(10, 1, "abc").over(15, 1).world(20, 2, "abc")
    found = goodput(story.records)
    assert found.active_nodes == (10 * 2 + 5 * 3 + 5 * 0) / (20 * 4)
    assert found.available_nodes == (10 * 2 + 10 * 3) / (20 * 4)


def test_a_live_job_is_counted_up_to_now():
    fold = GoodputFold()
    for record in stepping(2).records:
        fold.feed(record)
    assert fold.at(100 + 10).total == 10
    assert fold.at(100 + 10).productive == 10
    assert fold.at().total == 2


# --- whatever is told, the parts add up ----------------------------------------------------------


@settings(max_examples=60 * SOAK, deadline=None)
@given(LOGS)
def test_goodput_of_any_log_has_parts_that_add_up_to_the_total(records):
    fold, latest = GoodputFold(), None
    for record in records:
        fold.feed(record)
        found = fold.at(record.time + 3)
        assert set(found.micros) == set(PARTS)
        assert min(found.micros.values()) >= 0
        assert sum(found.micros.values()) == round(found.total * 1e6)
        if latest is not None:
            assert found.total >= latest
        latest = fold.at().total
    assert fold.at() == goodput(records), "asking in between changes nothing"
    if records and not any(isinstance(record.event, events.JobEnded) for record in records):
        times = [round(record.time * 1e6) for record in records]
        assert sum(fold.at().micros.values()) == max(times) - times[0]
