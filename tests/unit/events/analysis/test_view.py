from __future__ import annotations

import pytest

from tests.unit.events import stories
from torchelastic.events import types as events
from torchelastic.events import words
from torchelastic.events.analysis.goodput import goodput
from torchelastic.events.analysis.view import HISTORY_LIMIT, JobFold, JobView, fold, without
from torchelastic.events.failure import node_failure
from torchelastic.events.types import Event


class Story(stories.Story):
    """Records in order, one second apart."""

    def __init__(self) -> None:
        super().__init__(nodes="")

    def tell(self, event: Event, *, by: str = "a", generation: int | None = None) -> Story:
        return super().tell(float(len(self.records)), event, by=by, generation=generation)

    def agent(self, name: str) -> Story:
        self.tell(events.AgentStarted(1, "a:1", ["train.py"], 1, 3, 2), by=name)
        return self.tell(events.Joined(name, "a:1", False), by=name)

    def world(self, generation: int, *names: str, by: str = "a", used=0, spares=()) -> Story:
        size, spares = 2 * len(names), list(spares)
        formed = events.WorldFormed(list(names), size, "a:2", "the job starts", used, spares)
        return self.tell(formed, by=by, generation=generation)

    def view(self) -> JobView:
        return fold(self.records)

    def states(self) -> dict[str, str]:
        return {name: node.state for name, node in self.view().nodes.items()}


def test_an_agent_goes_by_its_id_until_it_has_a_name():
    assert fold([]) == JobView()
    story = Story().tell(events.AgentStarted(1, "", ["t"], 1, 3, 2))
    assert story.states() == {"id-a": "starting"}
    story.tell(events.Joined("a", "a:1", True))
    assert story.states() == {"a": "joined"}
    node = story.view().nodes["a"]
    assert (node.agent, node.hosting, node.last_seen) == ("id-a", True, 1001)
    assert (story.view().min_nodes, story.view().max_nodes) == (1, 3)


def test_a_world_says_who_runs_and_who_waits():
    story = Story().agent("a").world(0, "a", "b", spares=["c"], used=2)
    view = story.view()
    assert story.states() == {"a": "running", "b": "running", "c": "spare"}
    assert (view.phase, view.generation, view.size) == ("running", 0, 4)
    assert (view.restarts_used, view.started) == (2, 1000)
    assert [node.name for node in view.members()] == ["a", "b"]
    assert view.last_change.what == "generation 0 began"
    assert view.last_change.why == "the job starts"


def test_why_a_node_is_held_out_until_it_is_in_a_world_again():
    story = Story().agent("a")
    for generation, nodes in enumerate((["a"], ["a", "c"])):
        spares = [name for name in ("c", "d") if name not in nodes]
        held = {"c": "held out for 60 s: no GPU"} if "c" in spares else {}
        formed = events.WorldFormed(nodes, 1, "a:2", "why", 0, spares, held=held)
        story.tell(formed, generation=generation)
        assert {name: node.held for name, node in story.view().nodes.items() if node.held} == held


@pytest.mark.parametrize(
    ("event", "by", "dead", "shown"),
    [
        (events.NodeJoined("e"), "a", set(), True),
        (events.NodeLost("c", "its lease ended"), "a", set(), False),
        (events.JobEnded(0, "done"), "c", set(), False),
        (events.JobEnded(0, "done"), "a", {"id-c"}, False),
        (events.JobEnded(0, "done"), "a", set(), True),
    ],
    ids=["while it runs", "lost", "ended", "died", "others ended"],
)
def test_why_a_node_was_held_out_is_shown_no_more_when_it_is_gone(event, by, dead, shown):
    story = Story().agent("a").agent("c")
    held = {"c": "held out for 60 s: no GPU"}
    story.tell(events.WorldFormed(["a"], 1, "a:2", "why", 0, ["c"], held=held), generation=0)
    story.tell(event, by=by)
    assert bool(without(story.view(), dead).nodes["c"].held) == shown


def test_ended_job_holds_out_no_node():
    """The other node's events have not arrived."""
    story = Story().agent("a")
    held = {"c": "held out for 60 s: no GPU"}
    story.tell(events.WorldFormed(["a"], 1, "a:2", "why", 0, ["c"], held=held), generation=0)
    assert without(story.view(), {"id-a"}).nodes["c"].held == ""
    assert story.tell(events.JobEnded(0, "done")).view().nodes["c"].held == ""


def test_a_world_told_by_several_agents_counts_once():
    story = Story().agent("a").agent("b").world(0, "a", "b").world(0, "a", "b", by="b")
    assert [change.what for change in story.view().history] == ["generation 0 began"]


def test_the_leader_tells_who_comes_and_goes():
    story = Story().agent("a").tell(events.BecameLeader()).world(0, "a", "b", "c")
    story.tell(events.NodeLost("b", "its lease ended"))
    story.tell(events.NodeLeaving("c", "SIGTERM"))
    story.tell(events.NodeJoined("d"))
    assert story.states() == {"a": "running", "b": "lost", "c": "leaving", "d": "joined"}
    assert story.view().nodes["a"].leader
    assert story.tell(events.NodeJoined("b")).states()["b"] == "joined"
    story.tell(events.NodeLost("b", "its lease ended again")).world(1, "a", "d")
    assert story.states() == {"a": "running", "d": "running"}


def test_other_nodes_tell_who_leads_as_well():
    story = Story().agent("a").world(0, "a", "b")

    def leaders():
        return [node.name for node in story.view().nodes.values() if node.leader]

    assert leaders() == []
    story.tell(events.LeaderFound("b"))
    assert leaders() == ["b"]
    story.world(1, "b", "a")
    assert leaders() == ["b"]
    story.tell(events.BecameLeader())
    assert leaders() == ["a"]
    story.tell(events.LeaderFound("nobody that is known"))
    assert leaders() == []


def test_a_node_of_this_machine_stays_listed_outside_the_world():
    story = Story().agent("a").agent("b").world(0, "a", "b").world(1, "a")
    assert story.states() == {"a": "running", "b": "joined"}


def test_the_phase_follows_events():
    few, enough = events.Waiting(2, ["b"], "1 of 2"), events.Waiting(2, [], "2 of 2", enough=True)
    for event, generation, phase in (
        (events.GenerationOver("failure", "boom"), 4, "restarting"),
        (events.WorkersStopped(0.1), 4, "restarting"),
        (events.WorkersStopped(0.1), 3, "running"),  # of an older generation
        (events.WorkerExited(0, 0, 7, 1), 4, "running"),
        (events.Note("hello"), 4, "running"),
        (few, 4, "waiting"),
        (enough, 4, "restarting"),
        (events.JobEnded(1, "all restarts used"), 4, "ended"),
    ):
        story = Story().agent("a").world(4, "a").tell(event, generation=generation)
        assert story.view().phase == phase, event
    story = Story().agent("a").tell(few, generation=0)
    assert story.view().phase == "waiting"
    assert story.tell(enough, generation=0).view().phase == "starting"


def test_waiting_is_reported_every_minute_and_remembered_once():
    story = Story().agent("a")
    for minutes in (3, 2, 1):
        story.tell(events.Waiting(2, [], f"for {minutes} min more"), generation=0)
    assert [change.why for change in story.view().history] == ["for 1 min more"]


def test_a_lost_lease_and_a_signal_are_reported():
    story = Story().agent("a").world(0, "a").tell(events.LeaseLost("silence for 3 s"))
    assert story.states() == {"a": "rejoining"}
    story.tell(events.SignalReceived("SIGTERM", "leaving the job")).tell(events.Leaving("SIGTERM"))
    assert story.states() == {"a": "leaving"}
    assert [change.what for change in story.view().history[-2:]] == [
        "a lost its lease",
        "a received SIGTERM",
    ]


def test_a_job_has_ended_when_all_agents_of_this_machine_have():
    story = Story().agent("a").agent("b").world(0, "a", "b")
    story.tell(events.JobEnded(143, "left"), by="b")
    assert (story.view().phase, story.view().ended) == ("running", None)
    story.tell(events.LeaderFound("a"), by="b")  # on its way out
    story.tell(events.JobEnded(1, "failed", {"rank": 3}), by="a")
    view = story.view()
    assert (view.phase, view.exitcode) == ("ended", 1)
    assert view.failure.cause.rank == 3
    assert view.ended == story.records[-1].wall
    assert view.nodes["b"].exitcode == 143


def test_an_agent_that_comes_back_begins_again():
    story = Story().agent("a").world(0, "a").tell(events.JobEnded(143, "left"))
    story.tell(events.AgentStarted(2, "a:1", ["train.py"], 1, 3, 2), by="again")
    assert (story.view().phase, story.view().ended) == ("starting", None)


def test_agents_that_died_without_a_word():
    story = Story().agent("a").agent("b").world(0, "a", "b", "c")
    one = without(story.view(), {"id-a"})
    assert (one.phase, one.nodes["a"].state, one.nodes["b"].state) == ("running", "died", "running")
    assert without(story.view(), {"id-a", "id-b"}).phase == "died"
    ended = Story().agent("a").tell(events.JobEnded(0, "done")).view()
    assert without(ended, {"id-a"}) == ended


def test_events_of_a_later_version_are_ignored():
    story = Story().agent("a").world(0, "a")
    view = fold([*story.records, stories.record(1000, None, "id-a")])
    assert view.phase == "running"
    assert view.nodes["a"].last_seen == 2000


def test_the_history_is_bounded():
    story = Story().agent("a")
    for generation in range(HISTORY_LIMIT + 5):
        story.world(generation, "a")
    history = story.view().history
    assert len(history) == HISTORY_LIMIT
    assert history[-1].what == f"generation {HISTORY_LIMIT + 4} began"


def test_a_lost_node_is_listed_until_the_next_world_even_if_its_agent_was_heard():
    story = Story().agent("a").agent("b").world(0, "a", "b").tell(events.NodeLost("b", "silence"))
    assert story.states()["b"] == "lost"
    assert "b" not in story.world(1, "a").states()
    assert story.tell(events.JobEnded(1, "failed")).view().phase == "ended", "of those left"


# --- steps, worlds, goodput ----------------------------------------------------------------------


def trained() -> stories.Story:
    story = stories.Story(workers=2).world(0, 0).workers_start(1, 0).trains(2, 0, step=0)
    for step in range(1, 21):
        progress = events.Progress([0, 1], [step, step], [102.0 + step / 2] * 2)
        story.tell(2 + step / 2, progress, generation=0)
    return story


def test_how_far_and_how_fast_each_worker_is():
    view = fold(trained().records)
    assert (view.step, view.rate) == (20, 2.0)
    assert [(one.rank, one.node, one.step, one.rate) for one in view.ranks] == [
        (0, "a", 20, 2.0),
        (1, "a", 20, 2.0),
        (2, "b", None, None),
        (3, "b", None, None),
    ]


def test_view_rate_of_a_running_job_is_zero_when_its_step_is_overdue():
    story = stories.Story().world(0, 0).trains(0, 0, step=0)
    for second in range(1, 4):
        story.steps(second, 0, 18 * second)
    job = JobFold()
    for one in story.records:
        job.feed(one)
    assert (job.view(1005).rate, job.view(1005).ranks[0].rate) == (18.0, 18.0)
    assert (job.view(1054).rate, job.view(1054).ranks[0].rate) == (0.0, 0.0)
    assert job.view().rate == 18.0, "the last one of a job that has ended"


def test_the_rate_is_that_of_the_last_seconds():
    story = trained()
    for step in range(21, 41):
        story.steps(12 + 4 * (step - 20), 0, step)
    assert fold(story.records).ranks[0].rate == pytest.approx(0.25)


def test_a_new_world_has_taken_no_step():
    story = trained().over(13, 0).world(14, 1)
    assert (fold(story.records).step, fold(story.records).ranks) == (None, ())
    assert fold(story.steps(13.5, 0, 21).records).step is None


def test_a_world_was_ended_by_what_the_leader_found_in_the_end():
    gone = node_failure("b", 0, "its lease has ended").to_json()
    story = trained().over(13, 0, reason="rank 0 lost a peer")
    assert fold(story.records).worlds[0].end_kind == "failure"
    verdict = events.RestartDecided(True, "b failed", "node-failure", gone)
    story.tell(13.5, verdict, generation=1).world(14, 1, "a")
    assert [world.end_kind for world in fold(story.records).worlds] == ["node-failure", ""]


def test_worlds_are_a_timeline():
    story = trained().over(13, 0, reason="boom").world(14, 1, "a", reason="again").end(20)
    first, second = fold(story.records).worlds
    assert (first.generation, first.nodes, first.count, first.size) == (0, ("a", "b"), 2, 4)
    assert (first.began, first.ended) == (1000, 1013)
    assert (first.end_kind, first.end_why) == ("failure", "boom")
    assert (second.began, second.why, second.ended, second.end_why) == (1014, "again", 1020, "done")


def test_a_straggler_that_keeps_up_again_is_forgotten_and_its_cost_is_not():
    slow = events.Straggler(3, 0.5, 0.25, 7.5, "rank 3 is slow", lost=7.5)
    over = events.Straggler(3, 0.25, 0.25, 9.0, "rank 3 keeps up", lost=9.0, over=True)
    story = trained().tell(13, slow, generation=0).tell(14, over, generation=0)
    view = fold(story.records[:-1])
    assert (view.stragglers, view.last_change.what) == ((slow,), "rank 3 is slow")
    assert fold([*story.records[:-1], *Story().world(1, "a").records]).stragglers == ()
    view = fold(story.records)
    assert (view.stragglers, view.straggler_seconds) == ((), 9.0)
    assert view.last_change.what == "rank 3 keeps up"
    story.world(15, 1).tell(16, slow, generation=1)
    assert fold(story.records).straggler_seconds == 16.5


def test_straggler_cost_reported_in_the_next_world_counts():
    slow = events.Straggler(3, 0.5, 0.25, 4.0, "rank 3 is slow", lost=4.0)
    last = events.Straggler(3, 0.5, 0.25, 7.5, "it was slow", lost=7.5, again=True)
    story = trained().tell(13, slow, generation=0).world(14, 1)
    story.tell(14.1, last, generation=0).tell(15, slow, generation=1)
    view = fold(story.records)
    assert (view.stragglers, view.straggler_seconds) == ((slow,), 11.5)
    assert fold(story.world(16, 2).world(17, 3).records).straggler_seconds == 11.5


def test_a_straggler_that_costs_more_is_not_reported_twice_in_the_history():
    slow = events.Straggler(3, 0.5, 0.25, 7.5, "rank 3 is slow")
    worse = events.Straggler(3, 0.5, 0.25, 15.0, "rank 3 is still slow", again=True)
    view = fold(trained().tell(13, slow, generation=0).tell(14, worse, generation=0).records)
    assert view.stragglers == (worse,)
    assert view.last_change.what == "rank 3 is slow"


def test_a_rank_shows_its_own_time_for_a_step_where_that_is_reported():
    story = trained()
    for at in (20.0, 30.0, 40.0):
        told = events.Progress([0, 1], [int(at) + 5] * 2, [100.0 + at] * 2, own=[at / 4])
        story.tell(at, told, generation=0)
    ranks = {rank.rank: rank for rank in fold(story.records).ranks}
    assert (ranks[0].own, ranks[1].own) == (0.25, None)


def test_goodput_is_part_of_the_picture_and_counts_up_to_now():
    folded = JobFold()
    for record in trained().records:
        folded.feed(record)
    assert folded.view().goodput == goodput(trained().records)
    assert folded.view(now=1012 + 60).goodput.total == 12 + 60
    assert folded.view(now=900).goodput.total == 12, "a wall clock that was set back does no harm"


def test_a_world_that_is_reported_again_has_its_replicas():
    story = Story()
    for replica in (0, 4):
        formed = events.WorldFormed(["a", "b"], 8, "a:2", "why", 0, replica=replica)
        story.tell(formed, generation=0)
    seen = story.view()
    assert (seen.replica, [world.replica for world in seen.worlds]) == (4, [4])
    assert words.workers(seen) == "2 replicas of 4 workers on 2 nodes"
