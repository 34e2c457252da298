"""What the report says of what was measured."""

from __future__ import annotations

import pytest

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.launchers import FAST, OURS, OURS_NO_ZYGOTE, SAFE, TORCHRUN
from benchmarks.harness.report import best_setting, render, seconds
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.summary import summarize


def results(row, **times):
    """Results of one row; a time of None is a failure, a negative one a split job."""
    made = Results({"torch": "2.13.0"})
    names = {"ours": OURS.name, "safe": SAFE.name, "fast": FAST.name}
    for key, many in times.items():
        for each in many:
            split = each is not None and each < 0
            made.add(row, names[key], Repetition(abs(each) if each else each, overlaps=int(split)))
    return made


def line(text, start):
    return next(each for each in text.splitlines() if each.startswith(f"| {start}"))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.3, 0.1, 0.2], "0.20 s (0.10 to 0.30)"),
        ([0.3, None], "0.30 s (0.30 to 0.30), 1 of 2 failed"),
        ([None, None], "2 of 2 failed"),
        ([], "not measured"),
    ],
)
def test_a_cell_of_seconds_hides_no_failure(times, expected):
    assert seconds(summarize(times)) == expected


@pytest.mark.parametrize(
    ("safe", "fast", "expected"),
    [
        ([8.0], [7.0], FAST.name),
        ([8.0], [9.0], SAFE.name),
        ([8.0], [1.0, None], SAFE.name),  # fast, but it does not always come back
        ([8.0], [-1.0], SAFE.name),  # fast, but the job was split
        ([8.0, None], [7.0, None], FAST.name),
        ([None], [None], None),
    ],
)
def test_the_setting_of_torchrun_that_counts(safe, fast, expected):
    assert best_setting(results("worker", safe=safe, fast=fast), "worker") == expected


def test_a_row_is_met_or_missed_by_time_or_by_a_failure_or_has_no_rival():
    def judged(**times):
        return line(render(results("worker", **times)), "worker SIGKILL")

    met = judged(ours=[0.5], safe=[8.0])
    assert "16.0 times faster" in met
    assert met.endswith("at least 10 times faster: met |")
    assert "missed" in judged(ours=[1.0], safe=[8.0])
    assert "missed" in judged(ours=[0.1, None], safe=[8.0])
    alone = judged(ours=[0.5])
    assert "met |" not in alone
    assert "missed" not in alone


@pytest.mark.parametrize(
    ("times", "expected"),
    [([1.0] * 20, "met"), ([1.0] * 19 + [None], "missed"), ([1.0] * 5, "20 of 20 |")],
)
def test_twenty_newcomers_of_twenty(times, expected):
    text = line(render(results("grow", ours=times)), "a node joins: admitted")
    assert expected in text


def test_two_worlds_at_once_are_seen():
    text = line(render(results("grow", ours=[-1.0], safe=[2.0])), "a node joins: jobs in which")
    assert "1 of 1" in text
    assert "missed" in text


def test_cold_start():
    for pairs, expected in (
        ([(0.9, 1.0), (1.8, 2.0)], ": met"),
        ([(1.2, 1.0), (2.4, 2.0)], "missed"),
        ([(0.5, 1.0), (0.5, 1.0), (None, 1.0)], "missed"),
    ):
        assert expected in line(render(Results(cold={"2 workers": pairs})), "cold start, 2 workers")
    failed = Results(cold={"2 workers": [(0.5, 1.0), (None, 1.0)]})
    assert "1 of 2 pairs failed" in line(render(failed), "cold start, 2 workers")


def footprint(name, cpu, pss):
    return Footprint(name, cpu, pss, helpers_pss=100.0, worker_pss=90.0, worker_unique=30.0)


def test_idle():
    made = Results(
        idle={
            OURS.name: footprint(OURS.name, 0.1, 30.0),
            OURS_NO_ZYGOTE.name: footprint(OURS_NO_ZYGOTE.name, 0.1, 30.0),
            TORCHRUN.name: footprint(TORCHRUN.name, 0.5, 210.0),
        }
    )
    text = render(made)
    assert "| 0.10 % | 0.50 % |  | under 1 %: met |" in text
    assert "| 30 MB | 210 MB |  | under 80 MB: met |" in text


def test_results_survive_being_saved():
    made = results("worker", ours=[0.5, None], safe=[8.0])
    made.cold["2 workers"] = [(1.0, 2.0), (None, 1.0)]
    made.idle[OURS.name] = footprint(OURS.name, 0.1, 30.0)
    again = Results.from_json(made.to_json())
    assert again == made
    assert render(again) == render(made)


def test_report_saves_no_output_of_the_machine():
    made = Results()
    made.add("worker", OURS.name, Repetition(None, "ended", output="/some/path"))
    assert "/some/path" not in made.to_json()
