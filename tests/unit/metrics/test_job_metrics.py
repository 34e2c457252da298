"""A job in numbers: what is counted of its records."""

from math import isnan

import pytest

from tests.unit.events.stories import record
from torchelastic.events import types as events
from torchelastic.metrics.job_metrics import BOUNDS, Histogram, JobMetrics


class Story:
    """Records of one agent, and what is made of them."""

    def __init__(self):
        self.metrics = JobMetrics()

    def tell(self, at, event, generation=None):
        self.metrics.feed(record(at, event, generation=generation))
        return self

    def start(self):
        return self.tell(0.0, events.AgentStarted(1, "", ["train.py"], 1, 4, 2))

    def world(self, at, generation, size=2, nodes=("a",)):
        return self.tell(at, events.WorldFormed(nodes, size, "", "", generation), generation)

    def runs(self, at, generation):
        started = events.WorkersStarted(ranks=[0, 1], pids=[1, 2], seconds=0.1)
        return self.tell(at, started, generation)

    def families(self, now=None):
        return {family.name: family for family in self.metrics.families(now)}

    def value(self, name, **labels):
        return self.families()[name].values.get(tuple(labels.items()))

    def times(self, name):
        family = self.families()[name]
        return family.buckets[-1][1], round(family.sum, 6)


def test_the_world_as_it_stands():
    assert Story().value("phase", phase="starting") == 1
    assert "generation" not in Story().families()
    story = Story().start().world(1, 0).world(5, 3, size=6, nodes=("a", "b", "c"))
    assert story.value("job", run_id="job") == 1
    expected = {"generation": 3, "world_size": 6, "world_nodes": 3, "min_nodes": 1, "max_nodes": 4}
    assert {name: story.value(name) for name in expected} == expected
    assert story.value("restarts_used") == 3
    assert story.value("phase", phase="running") == 1
    assert story.value("phase", phase="waiting") == 0


def test_metrics_show_reported_values_and_checkpoint_age():
    story = Story().start().world(1, 0)
    assert not {"samples", "checkpoint_step"} & set(story.families())
    metrics = {'lo"ss': 2.5, "accuracy": None}
    story.tell(2, events.Progress([0], [50], [102.0], metrics=metrics, samples=640), 0)
    story.tell(9, events.CheckpointStored(0, 40, at=108.0, seconds=0.5, size=1000), 0)
    values = story.families()["metric"].values
    assert values[(("name", 'lo"ss'),)] == 2.5
    assert isnan(values[(("name", "accuracy"),)])
    assert story.value("samples") == 640
    values = story.families(now=1000 + 20)
    expected = {"step": 40, "bytes": 1000, "write_seconds": 0.5, "age_seconds": 12, "age_steps": 10}
    assert {name: values[f"checkpoint_{name}"].values[()] for name in expected} == expected


def test_a_failure_from_its_detection_until_workers_run_again():
    story = Story().start().world(1.5, 0).runs(2, 0)
    story.tell(10, events.WorkerFailed(failure={"rank": 0}), 0)
    story.tell(10.25, events.GenerationOver(kind="failure", reason=""), 0)
    story.tell(10.3, events.WorkerFailed(failure={"rank": 1}), 0)
    story.tell(10.5, events.WorkersStopped(seconds=0.1), 0)
    story.world(11, 1).runs(11.5, 1)
    story.tell(11.6, events.Training(rank=0, step=4, received=0), 1)
    assert story.value("generations_over", cause="failure") == 1
    assert story.value("worker_failures") == 2
    assert story.times("rendezvous_seconds") == (2, 1.5 + 0.75)
    assert story.times("recovery_seconds") == (1, 1.5)
    assert story.value("last_recovery_seconds", part="agree") == 0.75


def test_a_survivor_that_tells_of_a_lost_peer_is_no_worker_that_failed():
    story = Story().start().world(1, 0).runs(2, 0)
    story.tell(10, events.WorkerFailed(failure={"rank": 1, "alive": True}), 0)
    assert story.value("worker_failures") == 0
    story.tell(10.1, events.WorkerFailed(failure={"rank": 0, "alive": False}), 0)
    story.world(11, 1).runs(12, 1)
    assert story.value("worker_failures") == 1
    assert story.times("recovery_seconds") == (1, 2), "it is seen first by who lives on"


def test_resident_workers_have_recovered_when_they_train():
    story = Story().start().world(1, 0).runs(2, 0)
    story.tell(5, events.NodeLost(name="b", reason="silent"))
    story.world(5.5, 1)
    story.tell(5.6, events.Training(rank=0, step=4, received=0), 0)  # a word of the world before
    assert story.times("recovery_seconds") == (0, 0)
    story.tell(6, events.Training(rank=0, step=4, received=0), 1)
    assert story.times("recovery_seconds") == (1, 1)


@pytest.mark.parametrize("kind", ["resize", "leave", "finished"])
def test_recovery_histogram_ignores_ends_without_a_failure(kind):
    story = Story().start().world(1, 0).runs(2, 0)
    story.tell(5, events.GenerationOver(kind=kind, reason=""), 0)
    story.world(6, 1).runs(7, 1)
    assert story.value("generations_over", cause=kind) == 1
    assert story.times("recovery_seconds") == (0, 0)


def test_a_world_that_every_agent_tells_of_counts_once():
    story = Story().start().world(1, 0)
    story.tell(5, events.GenerationOver(kind="resize", reason=""), 0)
    story.world(6, 1).world(6.5, 1)
    assert story.times("rendezvous_seconds") == (2, 2)


def test_steps_of_each_rank():
    story = Story().start().world(1, 0).runs(2, 0)
    story.tell(3, events.Progress(ranks=[0, 1], steps=[2, -1], at=[103.0, 0.0]), 0)
    story.tell(13, events.Progress(ranks=[0, 1], steps=[22, 21], at=[113.0, 113.0]), 0)
    assert story.value("step", rank="0") == 22
    assert story.value("steps_per_second", rank="0") == 2
    assert story.value("steps_per_second", rank="1") is None


def test_stragglers_what_they_cost_and_hanging_workers():
    story = Story().start().world(1, 0).runs(2, 0)
    for at in (3.0, 13.0):
        story.tell(at, events.Progress(ranks=[0], steps=[int(at)], at=[100 + at], own=[at / 2]), 0)
    assert story.value("own_seconds_per_step", rank="0") == 0.5
    slow = events.Straggler(1, 1, 0.5, cost=7.5, text="slow", lost=8.0)
    story.tell(14, slow, 0).tell(15, events.WorkerKilled(0, 0, "timer 'x' expired"), 0)
    assert story.value("workers_killed") == 1
    assert story.value("straggler_cost_seconds", rank="1") == 7.5
    assert story.value("straggler_lost_seconds") == 8.0


def test_time_metrics_add_up_to_the_total():
    story = Story().start().world(1, 0).runs(2, 0)
    story.tell(3, events.Progress(ranks=[0, 1], steps=[1, 1], at=[103.0, 103.0]), 0)
    time = story.families(now=1000 + 10)["time_seconds"].values
    assert sum(time.values()) == pytest.approx(10)
    assert 0 <= story.value("goodput_ratio") <= 1


def test_without_a_step_there_is_no_ratio():
    families = Story().start().world(1, 0).runs(2, 0).families(now=1000 + 10)
    assert "goodput_ratio" not in families
    assert families["time_seconds"].values[("part", "unknown"),] == 8


def test_counters_never_go_down_however_long_the_job():
    story, last = Story().start(), 0
    for generation in range(60):
        story.world(10 * generation + 1, generation).runs(10 * generation + 2, generation)
        story.tell(10 * generation + 3, events.GenerationOver(kind="error", reason=""), generation)
        now = story.value("generations_over", cause="error")
        assert now == last + 1
        last = now
    assert story.times("recovery_seconds")[0] == 59


def test_a_histogram_counts_up_to_each_bound():
    times = Histogram()
    for seconds in (0.05, 0.06, 4.0, 1000.0):
        times.observe(seconds)
    buckets = dict(times.buckets())
    assert buckets["0.05"] == 1
    assert buckets["0.1"] == 2
    assert buckets["5.0"] == 3 == buckets["300.0"]
    assert buckets["+Inf"] == 4
    assert len(buckets) == len(BOUNDS) + 1
