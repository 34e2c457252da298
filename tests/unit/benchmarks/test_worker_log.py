"""What benchmarks read from the logs of workers."""

from __future__ import annotations

import contextlib
import json

import pytest

from benchmarks.harness.step_logs import StepLogs
from benchmarks.harness.worker_log import History, Step


def step(world, rank, number, finished, *, size=2, began=None, generation=0):
    return Step(
        world=world,
        size=size,
        generation=generation,
        rank=rank,
        pid=100 * world + rank,
        number=number,
        began=finished - 0.1 if began is None else began,
        finished=finished,
    )


def history(*steps):
    made = History()
    for each in steps:
        made.add(each)
    return made


def both_ranks(world, number, finished):
    return step(world, 0, number, finished), step(world, 1, number, finished + 0.01)


def test_a_step_is_finished_when_its_last_rank_has_finished_it():
    made = history(step(1, 0, 7, 10.0), step(1, 1, 7, 10.3))
    assert [(finish.number, finish.time) for finish in made.finishes] == [(7, 10.3)]
    assert history(step(1, 0, 7, 10.0)).finishes == []
    # Equal numbers of two worlds are two steps.
    assert history(step(1, 0, 7, 10.0), step(2, 1, 7, 10.3)).finishes == []


def test_a_line_of_a_worker_is_read():
    made = History()
    made.add_line(json.dumps({"event": "start", "pid": 1, "t": 1.0}))  # no step
    assert made.spans == {}
    line = {"t": 2.0, "event": "step", "pid": 5, "rank": 0, "size": 1, "generation": 3}
    made.add_line(json.dumps(line | {"world": 9, "step": 4, "began": 1.5}))
    span = made.spans[9]
    assert (span.began, span.ended, span.generations, span.pids) == (1.5, 2.0, {3}, {0: 5})
    assert made.first_finish(after=1.9).number == 4


@pytest.mark.parametrize(
    ("after", "size", "not_in", "expected"),
    [
        (0.0, None, (), 1),
        (10.0, None, (), 1),
        (10.5, None, (), 2),
        (0.0, None, (1,), 2),
        (0.0, 4, (), None),
        (30.0, None, (), None),
    ],
)
def test_the_first_finish_is_of_a_new_world_of_the_wanted_size(after, size, not_in, expected):
    made = history(*both_ranks(2, 1, 20.0), *both_ranks(1, 1, 10.0))
    found = made.first_finish(after=after, size=size, not_in=not_in)
    assert (found and found.world) == expected


@pytest.mark.parametrize(
    ("size", "now", "expected"),
    [
        (2, 12.2, 2.11),  # from the beginning of the first step to the end of the last
        (4, 12.2, 0.0),
        (2, 20.0, 0.0),  # it has stopped
    ],
)
def test_how_long_a_world_has_trained(size, now, expected):
    made = history(*both_ranks(1, 1, 10.0), *both_ranks(1, 2, 12.0))
    assert made.trained_for(size, now) == pytest.approx(expected)
    assert History().trained_for(size, now) == 0.0


def test_the_latest_world_is_the_one_that_stepped_last():
    made = history(*both_ranks(2, 1, 20.0), *both_ranks(1, 1, 10.0))
    assert made.latest().pids == {0: 200, 1: 201}


def test_two_worlds_that_train_in_turns_overlap():
    made = history(*both_ranks(1, 1, 10.0), *both_ranks(2, 1, 20.0), *both_ranks(3, 1, 30.0))
    assert made.overlapping() == []
    made = history(step(1, 0, 1, 10.0), step(2, 0, 1, 11.0), step(1, 0, 2, 12.0))
    assert [(a.world, b.world) for a, b in made.overlapping()] == [(1, 2)]
    assert made.overlapping(known={1, 2}) == []
    assert len(made.overlapping(known={1})) == 1
    # A step begun before the last one of the old world.
    made = history(step(1, 0, 1, 10.0), step(2, 0, 1, 10.5, began=9.9))
    assert len(made.overlapping()) == 1


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0.0, 100.0, 9.0),
        (11.5, 11.6, 9.0),  # inside the gap
        (0.0, 10.5, 1.0),
        (50.0, 60.0, 0.0),
    ],
)
def test_the_largest_gap_counts_whole_and_over_all_worlds(begin, end, expected):
    made = history(*(each for t in (10, 11, 20) for each in both_ranks(t, 1, float(t))))
    assert made.largest_gap(begin, end) == pytest.approx(expected)


def test_a_world_tells_its_times_from_the_start_of_the_job():
    made = history(*both_ranks(1, 1, 10.0))
    assert made.spans[1].to_json(origin=9.0) == {
        "size": 2,
        "generations": [0],
        "began": 0.9,
        "ended": 1.01,
    }


# --- step logs -----------------------------------------------------------------------------------


LINE = {"event": "step", "world": 1, "size": 1, "generation": 0, "rank": 0, "pid": 7, "began": 0.0}


def line(step):
    return json.dumps({**LINE, "step": step, "t": float(step)}) + "\n"


def test_whole_lines_are_read_once(tmp_path):
    with contextlib.closing(StepLogs(tmp_path / "logs")) as logs:
        assert logs.read().steps == [], "the directory comes later"
        (tmp_path / "logs").mkdir()
        first = tmp_path / "logs" / "1.jsonl"
        first.write_text(line(0) + line(1)[:9])
        assert [step.number for step in logs.read().steps] == [0]
        with first.open("a") as file:
            file.write(line(1)[9:])
        (tmp_path / "logs" / "2.jsonl").write_text(line(2))
        assert sorted(step.number for step in logs.read().steps) == [0, 1, 2]
        found = logs.wait_for(lambda seen: seen.first_finish(after=1.5), "a step", 0.0)
        assert found.number == 2
        with pytest.raises(TimeoutError, match="not seen within 0 s: more"):
            logs.wait_for(lambda seen: len(seen.steps) > 3, "more", 0.0)
