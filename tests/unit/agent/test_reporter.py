"""The reporter: generations, goodput and stragglers for people and the event log."""

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.support import FakeClock
from tests.unit.agent.cast import in_loop
from tests.unit.events.stories import Story, failure
from torchelastic.agent.telemetry.bad_step_watch import BadStepWatch
from torchelastic.agent.telemetry.job_events import JobEvents
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.telemetry.straggler_watch import StragglerWatch
from torchelastic.config import LaunchConfig
from torchelastic.events import types as events
from torchelastic.events.log import COLLECTED_FILE, EventLog, read_files
from torchelastic.events.record import Record
from torchelastic.events.types import Event, Joined, Note, Progress, StepSkipped, Straggler
from torchelastic.rendezvous import held_out
from torchelastic.rendezvous.restart_policy import RestartHistory
from torchelastic.rendezvous.world import World
from torchelastic.worker.orders import Begins


@pytest.fixture
def said(monkeypatch):
    """The agent's log lines; they go elsewhere than where pytest listens."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("torchelastic")
    monkeypatch.setattr(logger, "handlers", [handler])
    before = logger.level
    logger.setLevel(logging.INFO)  # not the attribute: loggers remember what they let through
    yield found
    logger.setLevel(before)


def reporter_of(tmp_path, *, nodes: int = 2, generation: int = 0) -> Reporter:
    """Of a node that has seen a world for three seconds."""
    clock = FakeClock()
    log = EventLog(tmp_path / "events.jsonl", job="job", node="a", clock=clock)
    config = LaunchConfig(max_nodes=nodes, rdzv_endpoint="127.0.0.1:1")
    reporter = Reporter(
        log, config, "train.py", "a", clock, prints_failure=False, for_others="COMMAND"
    )
    if generation >= 0:
        reporter._told = generation
        log.emit(events.WorldFormed(["a"], 1, "", "", 0), generation=generation)
        clock.advance(3.0)
        log.emit(events.JobEnded(0, "done"))
    log.close()
    return reporter


@pytest.mark.parametrize(("nodes", "others"), [(1, False), (2, True)])
def test_reporter_lost_lease_mentions_other_nodes_only_if_there_may_be_some(
    tmp_path, said, nodes, others
):
    reporter_of(tmp_path, nodes=nodes).lease_lost("")
    assert ("the other nodes treat this node as failed" in said[-1]) is others
    assert said[-1].endswith("it stops its workers and joins again")


def gather(tmp_path) -> None:
    """The story of both nodes, of ten seconds."""
    story = Story().world(1, 0).trains(2, 0, 0).steps(8, 0, 6).over(9, 0, "finished").end(10)
    lines = "".join(record.heard_at(record.mono).line() + "\n" for record in story.records)
    (tmp_path / COLLECTED_FILE).write_text(lines)


@pytest.mark.parametrize(
    ("nodes", "leads", "collected", "expected"),
    [
        (2, True, True, ["of 10 s: training 7"]),
        (2, False, True, []),
        (2, None, True, ["in 3.0 s", "(from this node's events only)"]),
        (2, True, False, ["in 3.0 s", "(from this node's events only)"]),
        (1, None, False, ["in 3.0 s"]),
    ],
)
def test_the_goodput_is_reported_by_the_node_that_has_the_whole_story(
    tmp_path, said, nodes, leads, collected, expected
):
    reporter = reporter_of(tmp_path, nodes=nodes)
    if collected:
        gather(tmp_path)
    asyncio.run(reporter.sum_up(tmp_path / COLLECTED_FILE, leads=leads))
    assert len(said) == bool(expected)
    for words in expected:
        assert words in said[0]
    assert ("events only" in "".join(said)) == (len(expected) == 2)


# --- looking for the others ----------------------------------------------------------------------


@pytest.mark.parametrize("finds", [True, False])
def test_a_node_that_looks_for_the_others_for_a_while_says_so(tmp_path, said, monkeypatch, finds):
    async def look() -> None:
        reporter.joins()
        if finds:
            reporter.ended(None, "", None)
        deadline = asyncio.get_running_loop().time() + 30
        while not said and not finds and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    monkeypatch.setattr("torchelastic.agent.telemetry.reporter.JOINING_QUIET", 0.0)
    reporter = reporter_of(tmp_path, generation=-1)
    asyncio.run(look())
    expected = f"looking for job {reporter._config.run_id} at 127.0.0.1:1, for 1 h more"
    assert said == ([] if finds else [expected])


def test_a_hang_in_which_nobody_waits_is_written_down_and_not_said(tmp_path, said):
    reporter = reporter_of(tmp_path)
    for waiting in (False, True):
        assert said == []
        rank = {"rank": 0, "node": "a", "step": 3, "collective": "", "waiting": waiting}
        reporter.hang(0, events.Hang("rank 1 is missing", [1], [rank]))
    assert said == ["workers are hung: rank 1 is missing"]


def test_whether_nodes_are_waited_for_or_only_get_ready_is_reported(tmp_path, said):
    reporter = reporter_of(tmp_path)
    told: list[events.Event] = []
    reporter._log.listen(lambda record: told.append(record.event))
    for enough in (True, False):
        seen = World(generation=0, phase="waiting", count=1, reason="no world", enough=enough)
        reporter.world_seen(seen)
    assert told == [events.Waiting(1, [], "no world", enough=enough) for enough in (True, False)]


def test_the_command_for_the_other_nodes_is_reported_while_they_are_waited_for(tmp_path, said):
    reporter = reporter_of(tmp_path)
    waits = World(generation=0, phase="waiting", count=1, reason="no world")
    for seconds, times in ((0, 1), (30, 1), (31, 2)):
        reporter._clock.advance(seconds)
        reporter.world_seen(waits)
        assert said.count("start the other nodes with: COMMAND") == times


def test_why_a_generation_is_over_is_said_once_and_then_only_what_is_new(tmp_path, said):
    reporter = reporter_of(tmp_path)
    for reason in ("rank 0: boom", "rank 0: boom; the next one starts in 1 s"):
        reporter.world_seen(World(generation=3, phase="over", reason=reason))
    assert said == [
        "generation 3 is over: rank 0: boom",
        "generation 3 is over: the next one starts in 1 s",
    ]


def test_a_node_that_finds_no_host_names_the_command_until_it_has_joined(tmp_path, said):
    reporter = reporter_of(tmp_path)
    reporter.without_host("Nobody is there.")
    reporter.name = "a"
    reporter.without_host("Nobody is there.")
    command = " Every node of this job needs: COMMAND"
    assert said == ["Nobody is there." + command, "Nobody is there."]


@pytest.mark.parametrize(
    ("count", "spares", "spare_count", "expected"),
    [
        (1, (), 0, "; this node warms up and joins the next generation"),
        (1, ("other",), 1, "; this node warms up and joins the next generation"),
        (1, ("a",), 1, "; this node waits as a spare"),
        (1, ("other",), 2, "; this node waits as a spare"),
        (2, (), 0, "; this node waits as a spare"),
    ],
)
def test_a_newcomer_that_warms_up_is_no_spare(tmp_path, said, count, spares, spare_count, expected):
    reporter = reporter_of(tmp_path, generation=-1)
    reporter.name = "a"
    world = World(generation=3, phase="running", count=count, reason="it grows")
    reporter.world_seen(replace(world, spares=spares, spare_count=spare_count))
    assert said[0].endswith(expected)


def test_a_node_that_is_held_out_says_so(tmp_path, said):
    reporter = reporter_of(tmp_path, generation=-1)
    reporter.name = "a"
    held = held_out.hold((), reporter._node, "a", "no GPU")
    world = World(generation=3, phase="running", count=1, reason="it grows", held=held)
    reporter.world_seen(world)
    reporter.world_seen(replace(world, generation=4, held=held_out.end_all_but(held, ())))
    ends = ["; this node is a spare, held out for 60 s", "; this node warms up"]
    assert [end in line for end, line in zip(ends, said, strict=True)] == [True, True]


def test_a_training_that_begins_without_a_checkpoint_is_reported_once_and_each_loss(tmp_path, said):
    reporter = reporter_of(tmp_path, nodes=1)
    begins = Begins(0, 0, stored=False)
    reporter.begins(begins, in_process=True)
    reporter.begins(Begins(1, 0, stored=False), in_process=True)
    assert len(said) == 1
    assert said[0].startswith("No checkpoint directory is set: ")
    lost = World(generation=2, phase="over", restarts=RestartHistory(best_step=9))
    reporter.world_seen(lost)
    reporter.begins(Begins(3, 0, stored=False), in_process=True)
    assert said[-1].startswith("All copies of the training state were lost: training restarts")
    told = [record.event for record in read_files([tmp_path / "events.jsonl"])]
    notes = [event.text for event in told if isinstance(event, events.Note)]
    assert notes == [said[0], said[-1]]


PEER = failure(generation=3, rank=0, message="lost a peer: connection closed", alive=True)
KILLED = failure(generation=3, rank=1, exitcode=-9, message="killed by SIGKILL")


@pytest.mark.parametrize("known", [True, False])
def test_the_end_of_a_generation_waits_a_moment_for_its_cause(tmp_path, said, monkeypatch, known):
    """Until the next world, or for a limited time; a cause that is known is reported at once."""
    monkeypatch.setattr("torchelastic.agent.telemetry.reporter.CAUSE_TIMEOUT", 60 if known else 0)
    over = World(generation=3, phase="over", cause=PEER, reason="rank 0 on a lost a peer")

    async def see() -> None:
        reporter = reporter_of(tmp_path)
        reporter.world_seen(over)
        assert said == []
        if known:
            reporter.world_seen(World(generation=4, phase="agreeing", cause=KILLED))
        while not said:
            await asyncio.sleep(0)
        reporter.world_seen(World(generation=5, phase="over", cause=KILLED, reason="a failure"))

    asyncio.run(asyncio.wait_for(see(), 10))
    reason = KILLED.sentence() if known else over.reason
    assert said == [f"generation 3 is over: {reason}", "generation 5 is over: a failure"]


# --- Stragglers: lines of all nodes in, words and a wish for a spare out --------------------------


def line(event: Event, node: str, generation: int | None = None) -> bytes:
    record = Record(
        type=event.type, job="j", node=node, wall=1.0, mono=1.0, generation=generation, event=event
    )
    return record.line().encode() + b"\n"


def progress(rank: int, look: int, own: float) -> Progress:
    """Ten steps further with each look."""
    return Progress([rank], [10 * look], [10.0 * look], own=[10 * own * look])


@pytest.fixture
def reported():
    return []


@pytest.fixture
def wished():
    return []


@pytest.fixture
def watch(reported, wished):
    made = StragglerWatch(
        1.5,
        lambda generation, found: reported.extend((generation, one) for one in found),
        lambda generation, nodes: wished.append((generation, nodes)),
    )
    made.turn_to(3, 2)
    return made


def listening(watch: StragglerWatch) -> JobEvents:
    job_events = JobEvents()
    job_events.listen(watch.take)
    return job_events


def hear(watch: StragglerWatch, looks: int, generation: int = 3) -> None:
    heard = listening(watch)
    heard.take_lines(line(Joined("node-a", "", True), "a") + line(Joined("node-b", "", False), "b"))
    for look in range(1, looks + 1):
        heard.take_lines(
            line(Note("nothing"), "a") + line(progress(0, look, 0.125), "a", generation)
        )
        heard.take_lines(line(progress(1, look, 0.5), "b", generation))


def test_a_straggler_is_reported_by_the_name_of_its_node(watch, reported, wished):
    hear(watch, 5)
    [(generation, straggler)] = reported
    assert (generation, straggler.rank, straggler.name) == (3, 1, "node-b")
    assert (straggler.seconds_per_step, straggler.usual) == (0.5, 0.125)
    assert wished == [(3, {"b"})]


def test_a_node_that_keeps_up_again_is_wished_away_no_more(watch, wished):
    hear(watch, 5)
    for look in range(6, 10):
        listening(watch).take_lines(line(progress(0, look, 0.125), "a", 3))
        well = Progress([1], [10 * look], [10.0 * look], own=[25.0 + 1.25 * (look - 5)])
        listening(watch).take_lines(line(well, "b", 3))
    assert wished == [(3, {"b"}), (3, set())]


def test_cost_of_straggler_is_reported_at_end_of_generation(watch, reported, wished):
    hear(watch, 9)
    watch.sum_up(before=3)
    assert len(reported) == 2, "it is not over yet"
    for _ in range(3):
        watch.sum_up(before=4)
    watch.turn_to(4, 2)
    watch.sum_up(before=5)
    assert [(generation, one.cost, one.name) for generation, one in reported] == [
        (3, pytest.approx(3 * 3.75), "node-b"),
        (3, pytest.approx(6 * 3.75), "node-b"),
        (3, pytest.approx(7 * 3.75), "node-b"),
    ]
    assert [one.again for _, one in reported] == [False, True, True]
    assert wished == [(3, {"b"})] * 2, "what is over is nobody's to replace"


@in_loop
async def test_of_a_job_of_one_node_its_own_log_is_followed(tmp_path, watch, reported):
    log = EventLog(tmp_path / "events.jsonl", job="j", node="a", clock=FakeClock())
    listening(watch).follow(log)
    log.emit(Joined("node-a", "", True))
    for look in range(1, 6):
        own = [1.25 * look, 5.0 * look]
        told = Progress([0, 1], [10 * look] * 2, [10.0 * look] * 2, own=own)
        log.emit(told, generation=3)
        assert reported == []
    await asyncio.sleep(0)
    log.close()
    assert [(one.rank, one.name) for _, one in reported] == [(1, "node-a")]


@in_loop
async def test_bad_step_is_logged_once_with_the_reports_of_all_ranks(said):
    watch = BadStepWatch(logging.getLogger("torchelastic").warning, FakeClock())
    heard = JobEvents()
    heard.listen(watch.take)
    for rank, node in ((0, "a"), (1, "b")):
        samples = [{"epoch": 0, "ids": [rank], "size": 2, "span": [0, 2]}]
        bad = StepSkipped(rank, 20, "bad", "nan", None, 0.0, rank == 1, "skip", samples)
        heard.take_lines(line(bad, node, 3))
    await asyncio.sleep(0)
    watch.say()
    heard.take_lines(line(bad, "b", 3))
    heard.take_lines(line(replace(bad, step=21), "b", 3))
    watch.say()
    end = "is skipped: bad (norm nan) on rank 1, samples 1"
    assert said == [
        f"step 20 {end}; `torchelastic skipped` prints the samples of all ranks",
        f"step 21 {end}",
    ]


def test_of_a_slow_node_with_many_workers_one_is_told_to_people(tmp_path, said):
    speaker, told = reporter_of(tmp_path, generation=-1), []
    speaker._log.listen(lambda record: told.append(record.event.rank))
    found = [Straggler(rank, 1.0, 0.5, float(rank), f"rank {rank}", "b") for rank in (4, 5, 6)]
    speaker.stragglers(3, [*found, Straggler(9, 1.0, 0.5, 1.0, "rank 9", "c", over=True)])
    assert said == ["rank 6 (and 2 more workers there)", "rank 9"]
    assert told == [6, 5, 4, 9]
