"""The last failure in a job's picture: by the leader's verdict, whatever the order of events."""

import json
from dataclasses import replace

from tests.unit.events.stories import Story, failure
from torchelastic.events import types as events
from torchelastic.events.analysis.last_failure import CONSEQUENCES_LIMIT
from torchelastic.events.analysis.view import fold
from torchelastic.events.failure import node_failure

LOG = ("loading", "step 7")
CAUSE = failure(generation=0, hint="out of memory: the kernel killed it", log_lines=LOG)
FELL = failure(
    generation=0, node="a", rank=0, pid=7, exitcode=1, message="lost a peer: rank 2", alive=True
)
GONE = node_failure("b", 0, "its lease has ended")


def begun(*, names: str = "ab") -> Story:
    return Story(nodes=names).world(1, 0, names).workers_start(2, 0, names)


def tell(story: Story, at: float, told, *, by: str = "b") -> Story:
    event = events.WorkerFailed(told.to_json())
    return story.tell(at, event, by=by, generation=told.generation)


def over(story: Story, at: float, cause, kind: str = "failure") -> Story:
    event = events.GenerationOver(kind, cause.sentence(), cause.to_json())
    return story.tell(at, event, generation=cause.generation)


def decided(story: Story, at: float, cause, *others, kind: str = "failure") -> Story:
    told = cause.to_json() if cause is not None else None
    event = events.RestartDecided(True, "why", kind, told, [one.to_json() for one in others])
    return story.tell(at, event, generation=1)


def test_stopped_worker_is_no_failure():
    lost = events.NodeLost("b", "its lease ended")
    stories = {
        "a resize": begun().over(5, 0, "resize", "c joins").world(6, 1).end(9),
        "a node that goes when all is done": begun().over(5, 0, "finished").tell(6, lost).end(7),
        "stopped by its own agent": tell(begun(), 5, failure(generation=0, stopped=True)),
        "lost a peer that leaves": decided(tell(begun(), 5, FELL, by="a"), 6, None, kind="leave"),
    }
    assert [name for name, story in stories.items() if fold(story.records).failure] == []


def test_the_first_failure_that_was_seen_stands_until_the_leader_has_spoken():
    story = tell(tell(begun(), 5, FELL, by="a"), 5.1, CAUSE)
    view = fold(story.records).failure
    assert (view.cause, view.consequences) == (FELL, (CAUSE,))
    assert (view.generation, view.wall, view.sentence) == (0, 1005, FELL.sentence())
    story = over(story, 5.2, FELL)
    assert fold(story.records).failure.cause == FELL
    story = decided(story, 5.3, CAUSE, FELL)
    view = fold(story.records).failure
    assert (view.cause, view.consequences) == (CAUSE, (FELL,))


def test_failure_is_shown_as_its_own_agent_reported_it():
    told = failure(generation=0, traceback="Traceback\nValueError: boom", log_lines=LOG)
    brief = failure(generation=0, by_itself=True)  # which only the leader knows
    story = decided(tell(begun(), 5, told), 5.3, FELL, brief)
    view = fold(story.records).failure
    assert (view.cause, view.consequences) == (FELL, (replace(told, by_itself=True),))


def test_a_lost_node_is_a_cause():
    story = tell(begun(), 5, FELL, by="a").tell(5.1, events.NodeLost("b", "its lease has ended"))
    story = decided(over(story, 5.2, GONE, "node-failure"), 5.3, GONE, FELL, kind="node-failure")
    view = fold(story.records).failure
    assert (view.sentence, view.cause) == ("b failed: its lease has ended", GONE)
    assert view.consequences == (FELL,)


def test_a_leave_does_not_undo_the_failure_before_it():
    story = decided(tell(begun(), 5, CAUSE), 6, CAUSE).world(7, 1)
    later = failure(generation=1, node="a", rank=0, message="lost a peer: rank 1")
    story = decided(tell(story, 8, later, by="a"), 9, None, kind="leave")
    assert fold(story.records).failure.cause == CAUSE


def test_the_last_of_several_failures_is_shown_also_when_the_job_recovered():
    story = decided(tell(begun(), 5, CAUSE), 6, CAUSE).world(7, 1)
    later = failure(generation=1, message="ValueError: boom")
    story = decided(tell(story, 8, later), 9, later).world(10, 2).end(20)
    view = fold(story.records)
    assert view.failure.cause == later
    assert view.exitcode == 0


def test_late_news_of_an_older_generation_changes_nothing():
    later = failure(generation=1, message="ValueError: boom")
    story = tell(tell(begun().world(7, 1), 8, later), 9, CAUSE)
    assert fold(story.records).failure.cause == later


def test_the_log_of_one_node_that_does_not_lead_has_the_cause_at_the_end():
    story = tell(begun(), 5, FELL, by="a")
    story.tell(6, events.JobEnded(1, "all restarts used", CAUSE.to_json()), generation=0)
    view = fold(story.records).failure
    assert (view.cause, view.consequences) == (CAUSE, (FELL,))


def test_a_hang_is_part_of_the_failure_that_it_ends_in():
    row = {"rank": 2, "node": "b", "step": 7, "collective": "", "missing": True, "stack": 0}
    hang = events.Hang("rank 2 is missing from all_reduce #14", [2], [row], ["in the loader"])
    story = begun().tell(4, hang, generation=0)
    assert fold(story.records).failure is None
    view = fold(tell(story, 5, CAUSE).records)
    assert view.failure.hang["text"] == "rank 2 is missing from all_reduce #14"
    assert view.to_json()["failure"]["hang"]["ranks"][0]["stack"] == "in the loader"
    later = failure(generation=1, message="ValueError: boom")
    assert fold(tell(story.world(7, 1), 8, later).records).failure.hang is None


def test_failure_view_as_json_is_plain_data():
    story = decided(tell(begun(), 5, CAUSE), 6, CAUSE, FELL)
    data = json.loads(json.dumps(fold(story.records).to_json()))["failure"]
    assert data["generation"] == 0
    assert data["sentence"] == CAUSE.sentence()
    assert data["cause"]["log_lines"] == ["loading", "step 7"]
    assert data["cause"]["hint"] == "out of memory: the kernel killed it"
    assert [one["rank"] for one in data["consequences"]] == [0]
    assert data["hang"] is None


def test_thousands_of_failures_are_not_kept():
    story = begun()
    for rank in range(CONSEQUENCES_LIMIT + 9):
        story = tell(story, 5, failure(generation=0, rank=rank, pid=rank))
    assert len(fold(story.records).failure.consequences) == CONSEQUENCES_LIMIT


def test_nonsense_is_ignored():
    nonsense = (
        {},
        {"rank": "x"},
        {"generation": None, "log_lines": 3},
        {"message": {}, "hint": []},
    )
    for told in nonsense:
        story = begun().tell(5, events.WorkerFailed(told), generation=0)
        story.tell(6, events.RestartDecided(False, "", "failure", told, [told]), generation=0)
        view = fold(story.tell(7, events.JobEnded(1, "", told), generation=0).records)
        assert view.failure is not None, told
        json.dumps(view.to_json())
