"""The leader's eye on stragglers: lines of all nodes in, words and a wish for a spare out."""

import asyncio

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.telemetry import reporter
from torchelastic.agent.telemetry.straggler_watch import StragglerWatch
from torchelastic.clock import FakeClock
from torchelastic.config import LaunchConfig
from torchelastic.events.log import EventLog, read
from torchelastic.events.record import Record
from torchelastic.events.types import Event, Joined, Note, Progress, Straggler


def line(event: Event, node: str, generation: int | None = None) -> bytes:
    record = Record(
        type=event.type, job="j", node=node, wall=1.0, mono=1.0, generation=generation, event=event
    )
    return record.line().encode() + b"\n"


def progress(rank: int, look: int, own: float) -> Progress:
    """Ten steps further with each look."""
    return Progress([rank], [10 * look], [10.0 * look], own=[10 * own * look])


@pytest.fixture
def said():
    return []


@pytest.fixture
def wished():
    return []


@pytest.fixture
def watch(said, wished):
    made = StragglerWatch(
        1.5,
        lambda generation, found: said.extend((generation, one) for one in found),
        lambda generation, nodes: wished.append((generation, nodes)),
    )
    made.turn_to(3, 2)
    return made


def hear(watch: StragglerWatch, looks: int, generation: int = 3) -> None:
    watch.take_lines(line(Joined("node-a", "", True), "a") + line(Joined("node-b", "", False), "b"))
    for look in range(1, looks + 1):
        watch.take_lines(
            line(Note("nothing"), "a") + line(progress(0, look, 0.125), "a", generation)
        )
        watch.take_lines(line(progress(1, look, 0.5), "b", generation))


def test_a_straggler_is_reported_by_the_name_of_its_node(watch, said, wished):
    hear(watch, 5)
    [(generation, straggler)] = said
    assert (generation, straggler.rank, straggler.name) == (3, 1, "node-b")
    assert (straggler.seconds_per_step, straggler.usual) == (0.5, 0.125)
    assert wished == [(3, {"b"})]


def test_a_node_that_keeps_up_again_is_wished_away_no_more(watch, wished):
    hear(watch, 5)
    for look in range(6, 10):
        watch.take_lines(line(progress(0, look, 0.125), "a", 3))
        well = Progress([1], [10 * look], [10.0 * look], own=[25.0 + 1.25 * (look - 5)])
        watch.take_lines(line(well, "b", 3))
    assert wished == [(3, {"b"}), (3, set())]


def test_other_generations_and_junk_say_nothing(watch, said):
    hear(watch, 9, generation=2)
    watch.turn_to(2, 2)  # told late
    watch.take_lines(b'{"v":1,"type":"progress","ranks":[1]\n\xff\xfe\n\n')
    hear(watch, 5)
    assert len(said) == 1


def test_cost_of_straggler_is_reported_at_end_of_generation(watch, said, wished):
    hear(watch, 9)
    watch.sum_up(before=3)
    assert len(said) == 2, "it is not over yet"
    for _ in range(3):
        watch.sum_up(before=4)
    watch.turn_to(4, 2)
    watch.sum_up(before=5)
    assert [(generation, one.cost, one.name) for generation, one in said] == [
        (3, pytest.approx(3 * 3.75), "node-b"),
        (3, pytest.approx(6 * 3.75), "node-b"),
        (3, pytest.approx(7 * 3.75), "node-b"),
    ]
    assert [one.again for _, one in said] == [False, True, True]
    assert wished == [(3, {"b"})] * 2, "what is over is nobody's to replace"


def test_stragglers_are_reported_without_replacement(said):
    watch = StragglerWatch(1.5, lambda generation, found: said.extend(found), None)
    watch.turn_to(3, 2)
    hear(watch, 5)
    assert len(said) == 1


@in_loop
async def test_of_a_job_of_one_node_its_own_log_is_followed(tmp_path, watch, said):
    log = EventLog(tmp_path / "events.jsonl", job="j", node="a", clock=FakeClock())
    watch.follow(log)
    log.emit(Joined("node-a", "", True))
    for look in range(1, 6):
        own = [1.25 * look, 5.0 * look]
        told = Progress([0, 1], [10 * look] * 2, [10.0 * look] * 2, own=own)
        log.emit(told, generation=3)
        assert said == []
    await asyncio.sleep(0)
    log.close()
    assert [(one.rank, one.name) for _, one in said] == [(1, "node-a")]


def test_of_a_slow_node_with_many_workers_one_is_told_to_people(tmp_path, monkeypatch):
    spoken = []
    monkeypatch.setattr(reporter.logger, "warning", lambda *said: spoken.append(said[0] % said[1:]))
    log = EventLog(tmp_path / "events.jsonl", job="j", node="a", clock=FakeClock())
    config = LaunchConfig(rdzv_endpoint="127.0.0.1:1")
    speaker = reporter.Reporter(log, config, "x.py", "a", FakeClock(), prints_failure=False)
    found = [Straggler(rank, 1.0, 0.5, float(rank), f"rank {rank}", "b") for rank in (4, 5, 6)]
    speaker.stragglers(3, [*found, Straggler(9, 1.0, 0.5, 1.0, "rank 9", "c", over=True)])
    log.close()
    assert spoken == ["rank 6 (and 2 more workers there)", "rank 9"]
    assert [record.event.rank for record in read(log.path)] == [6, 5, 4, 9]
