"""The parts of `sharded.py` that need no job."""

from __future__ import annotations

import pytest

from benchmarks.harness import sharded_bars
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.sharded_contestants import OURS_SHARDED, PEERS, TORCHRUN_HSDP
from benchmarks.harness.sharded_phases import PHASES, phases, start_of
from benchmarks.harness.sharded_report import render
from benchmarks.harness.sharded_rows import (
    CONTROL,
    COST,
    ShardedResults,
    joint_pairs,
    received,
    resumed,
    returned,
)
from benchmarks.harness.steady import Cost
from benchmarks.harness.summary import summarize
from benchmarks.harness.worker_log import History, Step
from benchmarks.sharded import ROWS, attempt, counts, parse


def history(*steps):
    """Steps of (world, number of workers, number, finished)."""
    made = History()
    for world, size, number, finished in steps:
        for rank in range(size):
            made.add(Step(world, size, world, rank, rank, number, finished - 0.04, finished))
    return made


OLD = [(1, 4, number, number * 0.1) for number in range(1, 6)]


def test_the_others_stand_still_between_two_of_their_steps_and_not_at_the_kill():
    """A step takes 0.1; the kill is at 0.5 and costs 0.4, the return of the replica 0.3."""
    made = history(*OLD, (2, 2, 6, 0.9), (2, 2, 7, 1.0), (3, 4, 8, 1.3))
    whole = made.first_finish(after=0.5, size=4, not_in={1})
    found = returned(made, made.spans[1], whole, 0.5)
    assert found == {
        "seconds": pytest.approx(0.7),
        "step": 0.1,
        "began": pytest.approx(0.76),
        "steps_alone": 2,
        "stood_still": 2.0,
    }


@pytest.mark.parametrize(("first", "again"), [(6, 0), (3, 3)])
def test_steps_that_a_checkpoint_did_not_hold_are_done_again(first, again):
    made = history(*OLD, (2, 4, first, 9.0))
    found = resumed(made, made.spans[1], 0.5)
    assert found == {"began": pytest.approx(9.0 - 0.04 - 0.5), "redone": again}


def test_a_replacement_starts_when_it_is_asked_for_and_ends_where_it_trains():
    log = [
        {"type": "standby-started", "worker_pid": 7, "mono": 1.0, "seconds": 0.1},
        {"type": "standby-started", "worker_pid": 8, "mono": 5.3, "seconds": 0.1},
        {"type": "training", "generation": 3, "received": 100},
        {"type": "training", "generation": 3, "received": 50},
        {"type": "training", "generation": 2, "received": 7},
    ]
    lines = [{"event": "built", "pid": pid, "t": t} for pid, t in ((7, 1.5), (8, 5.6), (9, 9.0))]
    assert start_of(log, lines, at=5.0) == pytest.approx((5.2, 5.6))
    assert received(log, 3) == 150


def test_the_phases_of_a_return_add_up():
    made = history(*OLD, (2, 2, 6, 0.9), (2, 2, 7, 1.0), (3, 4, 8, 1.3))
    whole = made.first_finish(after=0.5, size=4, not_in={1})
    log = [
        {"type": "worker-exited", "generation": 0, "mono": 0.1},
        {"type": "worker-exited", "generation": 1, "mono": 0.52},
        {"type": "world-formed", "generation": 2, "mono": 0.6},
        {"type": "world-formed", "generation": 3, "mono": 0.97},
        {"type": "training", "generation": 2, "mono": 0.7, "fetched": 0.01},
        {"type": "training", "generation": 3, "mono": 1.1, "fetched": 0.06},
        {"type": "training", "generation": 3, "mono": 1.12, "fetched": 0.1},
    ]
    found = phases(log, (0.53, 0.95), made, made.spans[1], whole, at=0.5)
    assert found == pytest.approx([0.02, 0.01, 0.42, 0.02, 0.03, 0.04, 0.08, 0.08])
    assert len(found) == len(PHASES)
    assert sum(found) == pytest.approx(returned(made, made.spans[1], whole, 0.5)["seconds"])


def test_a_turn_is_the_mean_over_the_workers():
    lines = [
        {"event": "joint", "pid": pid, "joint": joint, "bare": 1.0}
        for pid, joint in ((1, 2.0), (2, 4.0), (1, 1.0), (2, 1.0))
    ]
    assert joint_pairs([{"event": "built"}, *lines]) == [(3.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("times", "median", "worst"),
    [((0.05, 0.06), True, True), ((0.05, 0.06, 0.2), True, False), ((0.05, None), False, False)],
)
def test_a_kill_is_judged_by_its_median_and_its_worst(times, median, worst):
    found = summarize(times)
    assert sharded_bars.kill_median(found).met is median
    assert sharded_bars.kill_worst(found).met is worst


def test_a_replica_is_back_in_one_and_a_half_times_its_start_and_copy():
    details = {"start": 0.2, "received": 100, "stood_still": 3.1}
    ratios = sharded_bars.back_ratios([Repetition(0.6, details=details)], bandwidth=500)
    assert ratios.times == (pytest.approx(1.5),)
    assert sharded_bars.back(ratios).met
    assert sharded_bars.stood_still([Repetition(0.6, details=details)]).met is False


@pytest.mark.parametrize(
    ("ratios", "met"), [((1.0, 1.001), True), ((1.05, 1.051), False), ((0.9, 1.1), None)]
)
def test_an_interval_across_the_limit_says_nothing(ratios, met):
    pairs = [(Cost(1.0, ratio, 9.0), Cost(1.0, 1.0, 8.0)) for ratio in ratios]
    assert sharded_bars.cpu_share(pairs).met is met


@pytest.mark.parametrize(("ours", "met"), [(9.0, True), (10.0, False), (8.0, False)])
def test_there_is_one_collective_more(ours, met):
    assert sharded_bars.collectives([(Cost(1, 1, ours), Cost(1, 1, 8.0))]).met is met


def test_the_report_shows_every_row():
    results = ShardedResults({"date": "today"}, bandwidth=1e9)
    kill = Repetition(0.05, details={"step": 0.06, "began": 0.04, "redone": 0})
    for row in ("kill", "kill-4x2"):
        results.add(row, OURS_SHARDED.name, kill)
    results.add("kill", TORCHRUN_HSDP.name, Repetition(8.0, details={"step": 0.06, "redone": 9}))
    details = {"start": 0.2, "received": 67_000_000, "stood_still": 1, "step": 0.06, "began": 0.3}
    details["phases"] = [0.05] * len(PHASES)
    results.add("back", OURS_SHARDED.name, Repetition(0.4, details=details))
    for comparison in (COST, CONTROL):
        results.steady[comparison.name] = [(Cost(0.02, 0.011, 9.0), Cost(0.02, 0.01, 8.0))] * 2
    results.joint = [(110e-6, 100e-6)] * 2
    shown = render(results)
    for text in (
        "one rank of 2 x 2 killed → next committed step, worst | 0.050 s",
        "torchrun tuned: 8.000 s (8.000 to 8.000), 9 steps again | 160 times faster",
        "one rank of 4 x 2 killed",
        "67 MB | 0.400 s (0.400 to 0.400) | start 0.200 s + copy: 0.267 s",
        "| all shards are there | 0.050 s (0.050 to 0.050) |",
        "collectives per step | 9 | native: 8 |  | exactly one more: met",
        "thread CPU time per step | 11.00 ms | native: 10.00 ms | 1.100",
        "A/A control: thread CPU",
        "110 us | plain gloo: 100 us | 1.100 (1.100 to 1.100) | 95 % interval up to 1.2: met",
    ):
        assert text in shown


def test_twenty_kills_and_everybody_meets_one():
    found = {one.name: count for one, count in counts("kill", quick=False)}
    assert found[OURS_SHARDED.name] == 20
    assert set(found) == {each.name for each in (OURS_SHARDED, *PEERS)}
    for row in ROWS[:3]:
        for contestant, _ in counts(row, quick=True):
            assert attempt(row, contestant).faults_per_job == 5
    assert parse(["--rows", "kill,joint"]).rows == ("kill", "joint")
