import dataclasses

from tests.unit.cli.tables import wrong
from tests.unit.events.analysis.test_goodput import undisturbed
from tests.unit.events.stories import Story, failure, record
from torchelastic.events import types as events
from torchelastic.events import words
from torchelastic.events.analysis.goodput import Goodput, goodput
from torchelastic.events.analysis.recoveries import Recovery
from torchelastic.events.analysis.view import JobView, NodeView, StoredView, WorldView


def said(event: events.Event | None, **fields) -> str:
    return words.sentence(record(0.0, event, fields=fields))


def test_an_event_is_a_sentence():
    cases = [
        (events.AgentStarted(7, "", ["t.py", "-v"], 1, 2, 1), "agent started (pid 7): t.py -v"),
        (events.Joined("a", "a:1", True), "hosts the rendezvous at a:1"),
        (events.NodeLost("b", "its lease ended"), "b was lost: its lease ended"),
        (events.NodeLost("b", ""), "b was lost"),
        (
            events.WorldFormed(["a", "b"], 4, "", "it begins", 0, ["c"]),
            "world formed with 4 workers on 2 nodes (a, b), spare: c: it begins",
        ),
        (
            events.WorldFormed(["a"] * 9, 9000, "", "", 0, [], 900),
            "world formed with 9,000 workers on 900 nodes (a, a, a, a, a, a, a, a and 1 more)",
        ),
        (
            events.GenerationOver("failure", "boom\nat line 3"),
            "generation ended (failure): boom",
        ),
        (events.WorkerExited(3, 1, 42, -9), "rank 3 (pid 42) was killed by SIGKILL"),
        (events.WorkerExited(3, 1, 42, 2), "rank 3 (pid 42) exited with code 2"),
        (events.WorkerFailed(failure().to_json()), "rank 2 failed at step 7: killed by SIGKILL"),
        (events.WorkerFailed({}), "rank None failed"),
        (events.Progress([0, 1], [-1, -1], [0, 0]), "ranks 0, 1 before the first step"),
        (events.Progress([0, 1], [4, 4], [0, 0]), "ranks 0, 1 at step 4"),
        (events.Progress([0, 1], [4, 5], [0, 0]), "ranks 0, 1 at step 4 to 5"),
        (events.Progress([3], [4], [0]), "rank 3 at step 4"),
        (
            events.Progress([3], [4], [0], metrics={"loss": 2.5, "accuracy": None}),
            "rank 3 at step 4, loss 2.5, accuracy not a number",
        ),
        (
            events.CheckpointStored(0, 40, at=1.0, seconds=0.25, size=5_000_000),
            "stored the checkpoint of step 40: 5.0 MB in 250 ms",
        ),
        (events.WeightsHashed(0, 40, "3f2a"), "weights sha256 3f2a at step 40"),
        (
            events.StepSkipped(1, 20, "the loss is a spike", 2.5, "inf", 12.34, False, "skip"),
            "rank 1, step 20, skip: the loss is a spike "
            "(norm 2.5, loss inf, 12.3 deviations above the median)",
        ),
        (events.Training(2, 8, 0), "rank 2 trains from step 8"),
        (
            events.Training(2, 8, 99, 0.25, 0.5),
            "rank 2 trains from step 8 (group built in 250 ms, 99 bytes fetched in 500 ms)",
        ),
        (events.RestartDecided(False, "no"), "the job is not restarted: no"),
        (events.Note("x" * 300), "x" * 199 + "…"),
    ]
    assert wrong(said, cases) == []


FILL = {"int": 1, "float": 1.0, "bool": True}


def filled(kind: str) -> object:
    if "Sequence" in kind:
        return [{"str": "x", "Json": {}}.get(kind.removeprefix("Sequence[")[:-1], 1)]
    return {} if "Json" in kind or "Mapping" in kind else FILL.get(kind, "x")


def test_every_event_has_words():
    for cls in events.EVENTS.values():
        text = said(cls(**{item.name: filled(str(item.type)) for item in dataclasses.fields(cls)}))
        assert text, cls
        assert "\n" not in text, cls


def test_an_event_of_a_later_version_is_shown_as_it_is():
    assert said(None, extra=5) == 'later-type {"extra": 5}'


def test_durations_are_as_exact_as_it_is_of_use():
    cases = [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (13.9, "14 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (119.7, "2 min"),
        (599.6, "10 min"),
        (3599, "1 h"),
        (8000, "2 h 13 min"),
    ]
    assert wrong(words.seconds, cases) == []


def test_how_long_a_job_has_run_is_reported_more_roughly():
    cases = [
        (-1, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (8000, "2 h 13 min"),
        (86400, "1 d"),
        (100000, "1 d 3 h"),
    ]
    assert wrong(words.span, cases) == []


def test_rates_and_sizes():
    rates = [(12.345, "12.3 steps/s"), (0.05, "20 s/step"), (0.0, "0 steps/s")]
    assert wrong(words.rate, rates) == []

    cases = [
        (1, "1 byte"),
        (890, "890 bytes"),
        (6890, "6.9 kB"),
        (5_000_000, "5.0 MB"),
        (12_345_678_900, "12.3 GB"),
    ]
    assert wrong(words.size, cases) == []


def test_how_far_a_job_is_and_whether_it_stands_still():
    cases = [
        (JobView(), 0.0, ""),
        (JobView(step=3), 0.0, "step 3"),
        (JobView(step=3, rate=2.0, stepped=100.0), 101.0, "step 3, 2 steps/s"),
        (JobView(step=3, rate=2.0, stepped=100.0), 109.0, "step 3, 2 steps/s"),
        (JobView(step=3, stepped=100.0), 109.0, "step 3"),
        (JobView(step=3, stepped=100.0), 400.0, "step 3, no new step for 5 min"),
        (JobView(step=3, rate=0.0, stepped=100.0), 400.0, "step 3, no new step for 5 min"),
        (JobView(step=3, rate=2.0, stepped=100.0), None, "step 3, 2 steps/s"),
        (JobView(step=3, rate=0.01, stepped=100.0), 400.0, "step 3, 100 s/step"),
    ]
    assert wrong(words.pace, cases) == []


def test_how_a_job_stands():
    cases = [
        (JobView(), "starting"),
        (JobView(phase="starting", started=100.0), "starting for 6 min"),
        (JobView(phase="running", started=100.0), "running for 6 min"),
        (JobView(phase="waiting", started=100.0), "waiting, started 6 min ago"),
        (JobView(phase="restarting", started=100.0), "restarting, started 6 min ago"),
        (
            JobView(phase="ended", started=100.0, ended=340.0, exitcode=3),
            "ended 2 min ago after 4 min, exit code 3",
        ),
        (
            JobView(
                phase="died",
                started=100.0,
                nodes={"a": NodeView(name="a", state="died", last_seen=400.0)},
            ),
            "killed 1 min ago after 5 min",
        ),
        (JobView(phase="died"), "killed"),
    ]
    assert wrong(lambda view: words.standing(view, 460.0), cases) == []


WORLD = WorldView(generation=0, nodes=("a",), count=3, size=6, began=1.0, why="")


def test_how_big_a_world_is_or_was():
    cases = [
        (JobView(size=2, nodes={"a": NodeView(name="a", state="running")}), "2 workers on 1 node"),
        (JobView(size=6, unnamed=3, worlds=(WORLD,)), "6 workers on 3 nodes"),
        (JobView(size=6, worlds=(WORLD,), phase="ended"), "6 workers on 3 nodes"),
        (JobView(size=1), "1 worker"),
    ]
    assert wrong(words.workers, cases) == []


STORED = StoredView(wall=100.0, step=40, seconds=1.0, size=1)


def test_how_old_the_last_checkpoint_is():
    cases = [
        (JobView(), 1.0, ""),
        (JobView(checkpoint=STORED), 280.0, "checkpoint of step 40, 3 min old"),
        (JobView(checkpoint=STORED, step=41), 280.0, "checkpoint of step 40, 3 min and 1 step old"),
        (JobView(checkpoint=STORED, step=52), None, "checkpoint of step 40, 12 steps old"),
        (JobView(checkpoint=STORED, step=30), None, "checkpoint of step 40, 0 steps old"),
        (JobView(checkpoint=STORED), None, "checkpoint of step 40"),
    ]
    assert wrong(words.checkpoint, cases) == []


def test_reported_metrics_fit_in_a_line():
    view = JobView(reported={"loss": 2.3456789, "lr": 1e-05, "accuracy": None, "steps": 100000.0})
    assert words.reported(view) == "loss 2.34568, lr 1e-05, accuracy not a number, steps 100000"
    assert words.reported(JobView()) == ""


def test_goodput_in_a_line():
    assert words.goodput(goodput(undisturbed().records)) == (
        "goodput 62.5% of 16 s: training 10 s; start-up 4.2 s, other 1.0 s, rendezvous 500 ms, "
        "restoring state 250 ms"
    )
    assert words.goodput(goodput([])) == "goodput: no time has passed yet"


def test_goodput_without_a_step_is_unknown():
    story = Story().world(0, 0).workers_start(0, 0).over(10, 0, "finished").end(10)
    assert words.goodput(goodput(story.records)) == (
        "goodput unknown (no step seen in 10 s): running (steps not reported) 10 s"
    )
    assert words.goodput_in_brief(goodput(story.records)) == "goodput unknown"
    assert words.goodput_in_brief(goodput(undisturbed().records)) == "goodput 62.5%"
    assert words.goodput_in_brief(goodput([])) == ""


def test_goodput_has_every_part_in_words():
    found = Goodput(micros=dict.fromkeys(words.PARTS, 1_000_000), disruptions=2)
    assert words.goodput(found).startswith("goodput 9.1% of 11 s, with 2 disruptions: ")
    assert all(name in words.goodput(found) for name in words.PARTS.values())


def test_the_cost_of_a_recovery_in_a_line():
    begun = Recovery(generation=0, wall=0, kind="failure", why="", detect=0.1)
    assert words.cost(begun) == "100 ms so far: detect 100 ms"
    assert words.cost(begun, over=True) == "the job ended"
    stepless = dataclasses.replace(begun, rebuild=0.1)
    assert words.cost(stepless) == "200 ms without redo: detect 100 ms, rebuild 100 ms"
    done = dataclasses.replace(begun, agree=0.2, rebuild=0.75, transfer=0.25, redo=0.6)
    assert words.cost(done) == words.cost(done, over=True)
    assert words.cost(done) == (
        "1.9 s: detect 100 ms, agree 200 ms, rebuild 750 ms, transfer 250 ms, redo 600 ms"
    )
    quick = dataclasses.replace(done, transfer=0.0, redo=0.0)
    assert words.cost(quick) == "1.1 s: detect 100 ms, agree 200 ms, rebuild 750 ms"


def test_the_cause_of_a_recovery_is_the_failure_and_not_why_the_next_world_was_formed():
    why = "enough workers are available again"
    change = Recovery(generation=0, wall=0, kind="failure", why=why)
    assert words.cause(change) == why
    fell = dataclasses.replace(change, failure=failure().to_json())
    assert words.cause(fell) == "rank 2 on b (local rank 0, pid 42) at step 7: killed by SIGKILL"
    assert words.cause(dataclasses.replace(change, why="")) == "unknown"
