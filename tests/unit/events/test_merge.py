import random

import pytest

from tests.support import FakeClock
from tests.unit.events.stories import record
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog, read_job
from torchelastic.events.merge import last_run, merged
from torchelastic.events.types import Note


def note(node: str, mono: float, **more):
    return record(mono, Note(f"{node} {mono}"), node, **{"mono": mono} | more)


def told(records) -> list[tuple[str, float]]:
    return [(record.node, record.time) for record in records]


def test_logs_of_one_machine_are_ordered_by_its_clock():
    a, b = [note("a", 1), note("a", 4)], [note("b", 2), note("b", 3)]
    assert told(merged([a, b])) == [("a", 1), ("b", 2), ("b", 3), ("a", 4)]


def test_a_record_that_is_in_two_logs_counts_once():
    collected = [note("a", 1, heard=1), note("b", 501, heard=2)]
    own = [note("b", 501), note("b", 503)]
    assert told(merged([own, collected])) == [("a", 1), ("b", 2), ("b", 4)]


def test_logs_of_several_machines_are_laid_on_one_clock_by_their_walls():
    a = [note("a", 1, wall=1001), note("a", 5, wall=1005)]
    b = [note("b", 700, wall=1002), note("b", 702, wall=1004)]
    assert told(merged([a, b])) == [("a", 1), ("b", 2), ("b", 4), ("a", 5)]


def test_a_second_leader_goes_on_with_the_clock_of_the_first():
    first = [note("a", 1, heard=1), note("b", 900, heard=2)]
    second = [note("b", 900, wall=1002, heard=900), note("c", 50, wall=1003, heard=903)]
    assert told(merged([second, first])) == [("a", 1), ("b", 2), ("c", 5)]


def test_the_order_of_the_files_does_not_matter():
    assert merged([]) == merged([[]]) == []
    a = [note("a", time / 10) for time in range(40)]
    b = [note("b", time / 7) for time in range(30)]
    c = [note("c", time / 5, heard=time / 5) for time in range(20)]
    expected = merged([a, b, c])
    for seed in range(5):
        files = [a, b, c]
        random.Random(seed).shuffle(files)
        assert merged(files) == expected


def test_a_run_begins_when_all_earlier_logs_have_ended():
    first = [note("a", 1), note("a", 5)]
    again = [note("b", 10), note("b", 20)]
    joins = [note("c", 15), note("c", 30)]
    late = [note("d", 25), note("d", 26)]
    assert last_run([joins, first, late, again]) == [again, joins, late]


# --- files ---------------------------------------------------------------------------------------


def write(path, job: str, node: str, *texts: str, at: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = FakeClock(at)
    log = EventLog(path, job=job, node=node, clock=clock)
    for text in texts:
        log.emit(Note(text))
        clock.advance(1.0)
    log.close()


def texts(records) -> list[str]:
    return [record.event.text for record in records]


def test_a_job_is_read_from_a_file_a_run_directory_and_a_log_directory(tmp_path):
    write(tmp_path / "job_x" / "events.jsonl", "job", "a", "one")
    write(tmp_path / "job_y" / "events.jsonl", "job", "b", "two", at=1.5)
    write(tmp_path / "job_x" / "events.jsonl", "job", "a", "three", at=2.0)
    assert texts(read_job(tmp_path)) == ["one", "two", "three"]
    assert texts(read_job(tmp_path / "job_x")) == ["one", "three"]
    assert texts(read_job(tmp_path / "job_y" / "events.jsonl")) == ["two"]


def test_which_job_of_a_place_is_meant_or_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="has no events"):
        list(read_job(tmp_path))
    write(tmp_path / "x" / "events.jsonl", "one", "a", "x")
    with pytest.raises(ConfigError, match="has no events of job 'two'"):
        list(read_job(tmp_path, job="two"))
    write(tmp_path / "y" / "events.jsonl", "two", "b", "y")
    with pytest.raises(ConfigError, match="several jobs: choose one of 'one', 'two'"):
        list(read_job(tmp_path))
    assert texts(read_job(tmp_path, job="two")) == ["y"]


def test_the_gathered_log_is_read_with_the_agents_own(tmp_path):
    write(tmp_path / "events.jsonl", "job", "a", "mine", "not gathered")
    mine, late = read_job(tmp_path)
    collected = EventLog(tmp_path / "job.jsonl", job="job", node="a", clock=FakeClock(0.0))
    collected.append(mine.heard_at(101.0))
    collected.append(note("b", 77, wall=mine.wall, heard=101.5))
    collected.close()
    found = list(read_job(tmp_path))
    assert [record.time for record in found] == [101.0, 101.5, 102.0]
    assert found[-1].event == late.event
