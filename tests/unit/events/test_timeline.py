"""The timeline as tables: which phase the job is in, and what is known of each generation."""

import pytest
from hypothesis import given, settings

from tests.support import SOAK
from tests.unit.events.stories import LOGS, Story, failure
from torchelastic.events import types as events
from torchelastic.events.failure import node_failure
from torchelastic.events.timeline import GENERATIONS_LIMIT, IN_WORLD, Generation, timeline

SILENCE = events.NodeLost("b", "silence")


STARTED = events.AgentStarted(1, "a:1", [], 1, 2, 1)


def waiting(*, enough: bool) -> events.Waiting:
    return events.Waiting(2, [], "1 of 2", enough=enough)


def decided(kind: str, cause: events.Json | None) -> events.RestartDecided:
    return events.RestartDecided(True, "the leader's words", kind, cause)


def stepping() -> Story:
    return Story().world(1, 0).trains(2, 0, step=0).steps(3, 0, 1)


PHASES = [
    (Story(), "starting"),
    (Story().tell(1, waiting(enough=True)), "starting"),
    (Story().tell(1, waiting(enough=False)), "waiting"),
    (Story().tell(1, waiting(enough=False)).tell(2, waiting(enough=True)), "starting"),
    (Story().world(1, 0), "entering"),
    (Story().world(1, 0).workers_start(2, 0).trains(2, 0, step=0), "entering"),
    (Story().world(1, 0).steps(2, 0, -1), "entering"),
    (stepping(), "training"),
    (stepping().over(4, 0), "over"),
    (stepping().tell(4, events.WorkersStopped(0.1), generation=0), "over"),
    (stepping().tell(4, events.WorkersStopped(0.1), generation=7), "training"),
    (stepping().tell(4, waiting(enough=True)), "over"),
    (stepping().tell(4, waiting(enough=False)), "waiting"),
    (stepping().tell(4, waiting(enough=False)).tell(5, waiting(enough=True)), "forming"),
    (stepping().over(4, 0).steps(4.1, 0, 2), "over"),
    (stepping().over(4, 0).world(5, 1), "entering"),
    (stepping().world(5, 0), "training"),
    (stepping().over(4, 0, "finished").end(5, "a"), "over"),
    (stepping().over(4, 0, "finished").end(5), "ended"),
    (stepping().end(5).steps(5.1, 0, 2), "ended"),
    (stepping().tell(4, SILENCE).end(5, "a"), "ended"),
    (stepping().end(5).world(6, 1), "ended"),
    (Story().end(5).tell(9, STARTED).tell(9, STARTED, by="b").end(10, "b"), "starting"),
    (stepping().end(5).tell(9, events.AgentStarted(1, "a:1", [], 1, 2, 1)), "starting"),
]


@pytest.mark.parametrize(("story", "phase"), PHASES)
def test_phase_follows_the_last_record(story, phase):
    assert timeline(story.records).phase == phase


def times(one: Generation) -> list[float | None]:
    """When it was formed, its workers ran, training continued, it stopped, it ended."""
    known = (one.formed, one.started, one.resumed, one.stopped, one.ended)
    return [None if at is None else round(at - 100, 6) for at in known]


TIMES = [
    (Story().world(1, 0), [1, None, None, None, None]),
    (Story().world(1, 0).workers_start(2, 0), [1, 2, 2, None, None]),
    (Story().world(1, 0).workers_start(2, 0).steps(4, 0, 5, entered=3), [1, 2, 3, None, None]),
    (Story().world(1, 0).workers_start(2, 0).trains(4, 0, step=5), [1, 2, 4, None, None]),
    (stepping().trains(4, 0, step=5), [1, None, 4, None, None]),
    (stepping().over(5, 0).trains(6, 0, step=5), [1, None, 2, 5, 5]),
    (stepping().over(5, 0).over(6, 0, "stop"), [1, None, 2, 5, 5]),
    (
        stepping().tell(5, events.WorkersStopped(0.1), generation=0).over(6, 0),
        [1, None, 2, 5, 6],
    ),
    (stepping().world(7, 1), [1, None, 2, 7, 7]),
    (stepping().end(8), [1, None, 2, 8, 8]),
]


@pytest.mark.parametrize(("story", "known"), TIMES)
def test_generation_times_are_those_of_its_first_signs(story, known):
    assert times(timeline(story.records).generations[0]) == known


KILLED = failure().to_json()
NODE = node_failure("b", 0, "silence").to_json()
NAMED = f"{failure().sentence()}; 1 of 3 restarts used"
ENDS = [
    ("still runs", stepping(), ("", "", None)),
    ("the leader said so", stepping().over(4, 0, "resize", "c joins"), ("resize", "c joins", None)),
    (
        "the leader said so twice",
        stepping().over(4, 0, "resize", "c joins").over(5, 0, "stop"),
        ("resize", "c joins", None),
    ),
    ("a worker failed", stepping().fails(4, 0).over(5, 0), ("failure", "boom", KILLED)),
    ("failure told late", stepping().over(4, 0).fails(5, 0), ("failure", "boom", None)),
    (
        "failure told late, next world",
        stepping().over(4, 0).fails(5, 0).world(6, 1, reason="again"),
        ("failure", "again", KILLED),
    ),
    (
        "the next world names another failure",
        stepping().fails(4, 0, rank=0).fails(4, 0).over(5, 0).world(6, 1, reason=NAMED),
        ("failure", NAMED, KILLED),
    ),
    (
        "verdict",
        stepping().fails(4, 0).over(5, 0).tell(6, decided("node-failure", NODE)),
        ("node-failure", "boom", NODE),
    ),
    (
        "verdict after the next world",
        stepping().fails(4, 0).over(5, 0).world(6, 1).tell(7, decided("node-failure", NODE)),
        ("node-failure", "it begins", NODE),
    ),
    (
        "acquittal",
        stepping().fails(4, 0).over(5, 0).tell(6, decided("leave", None)).world(7, 1),
        ("leave", "it begins", None),
    ),
    (
        "failure that nobody judged",
        stepping().fails(4, 0).over(5, 0).tell(6, decided("failure", None)),
        ("failure", "boom", KILLED),
    ),
    (
        "no word of the leader",
        stepping().tell(4, SILENCE).world(5, 1),
        ("unknown", "b was lost: silence", None),
    ),
    (
        "no word of the leader, but of a change",
        stepping().tell(4, events.WorldChanging("c joins"), generation=0).world(5, 1),
        ("resize", "c joins", None),
    ),
]


@pytest.mark.parametrize(
    ("story", "known"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_end_of_a_generation_is_explained_by_the_best_word(story, known):
    one = timeline(story.records).generations[0]
    assert (one.kind, one.why, one.cause) == known


def test_first_failure_and_slowest_transfer_count():
    story = Story().world(1, 0).trains(2, 0, step=0, fetched=0.3).trains(3, 0, step=0, fetched=0.1)
    [one] = timeline(story.fails(4, 0, rank=0).fails(5, 0, message="late").records).generations
    assert (one.transfer, one.hurt, one.hurt_why) == (0.3, 104, "killed by SIGKILL")


def test_plain_script_continues_with_the_first_step_of_any_rank():
    progress = events.Progress([0, 1], [1, 1], [104.0, 103.0])
    [one] = timeline(Story().world(1, 0).tell(5, progress, generation=0).records).generations
    assert one.resumed == 103


def test_world_is_that_of_the_first_report_and_the_largest_replica():
    formed = events.WorldFormed(["a"], 8, "", "why", 0, count=4)
    story = Story().tell(1, formed, generation=3)
    later = events.WorldFormed(["a", "b"], 4, "", "other", 0, replica=2)
    found = timeline(story.tell(2, later, generation=3).world(3, 2).records)
    [one] = found.generations
    assert (one.number, one.nodes, one.world.size, one.world.replica) == (3, 4, 8, 2)


def test_time_without_a_world_begins_with_the_agent_or_the_end_of_the_last():
    story = Story().world(3, 0).over(10, 0).world(12, 1).world(15, 2)
    without = [one.without for one in timeline(story.records).generations]
    assert without == [100, 110, None]


def test_long_job_keeps_the_last_generations():
    story = Story()
    for number in range(GENERATIONS_LIMIT + 3):
        story.world(number, number)
    found = timeline(story.records)
    assert [found.generations[0].number, len(found.generations)] == [3, GENERATIONS_LIMIT]


@settings(max_examples=60 * SOAK, deadline=None)
@given(LOGS)
def test_generations_follow_each_other_whatever_a_log_says(records):
    found = timeline(records)
    numbers = [one.number for one in found.generations]
    assert numbers == sorted(set(numbers))
    assert all(one.ended is not None for one in list(found.generations)[:-1])
    assert (found.phase in IN_WORLD) <= (found.current.stopped is None)
