"""The parts of `liveness.py` that need no job."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import liveness
from benchmarks.harness.launchers import OURS
from benchmarks.harness.liveness_rows import recovered
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import SPLIT, Repetition
from benchmarks.harness.worker_log import History, Step
from benchmarks.liveness import REPETITIONS, ROWS, judge, parse, render


def results(row, *times, **details):
    made = Results({"date": "today", "lease": 3.0})
    for each in times:
        note = "" if each is not None else "no step within 45 s"
        made.add(row, OURS.name, Repetition(each, note, details=dict(details)))
    return made


def line(text, row):
    [found] = [each for each in text.splitlines() if each.startswith(f"| `{row}` ")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_row_tells_who_passed_and_when():
    found = results("halves", 1.0, None, 3.0, whole=4.0, failed_starts=1)
    text = render(found)
    cells = line(text, "halves")
    assert cells[2:] == [
        "2 of 3",
        "healing",
        "2.00 s (1.00 to 3.00)",
        "1.50 to 2.50",
        "4.00 s (4.00 to 4.00)",
        "3",
        "20 of 20: **missed**",
    ]
    assert "a lease of 3 s" in text
    assert "- halves, torchelastic, 2: no step within 45 s" in text


def test_a_row_without_any_pass_has_no_times():
    assert line(render(results("halves", None)), "halves")[2:6] == [
        "0 of 1",
        "healing",
        "not measured",
        "",
    ]


@pytest.mark.parametrize(
    ("row", "times", "wanted"),
    [
        ("halves", [9.0] * REPETITIONS, "20 of 20: met"),
        ("halves", [9.0] * 3, "20 of 20"),
        ("halves", [9.0, None], "20 of 20: **missed**"),
        ("witness-host", [0.9] * REPETITIONS, "20 of 20, worst at most 1 s: met"),
        ("witness-host", [0.9] * 3, "20 of 20, worst at most 1 s"),
        ("witness-host", [0.9, 1.1], "20 of 20, worst at most 1 s: **missed**"),
        ("witness-host", [None], "20 of 20, worst at most 1 s: **missed**"),
        ("witness-spare", [3.9] * REPETITIONS, "20 of 20, worst at most 4 s: met"),
    ],
)
def test_fewer_repetitions_can_only_miss(row, times, wanted):
    assert judge(ROWS[row], results(row, *times).summary(row, OURS.name)) == wanted


@pytest.mark.parametrize(
    ("words", "repetitions"), [([], REPETITIONS), (["--quick"], 3), (["--repetitions", "7"], 7)]
)
def test_how_often(words, repetitions):
    assert parse(words).repetitions == repetitions


def test_rows_that_the_machine_does_not_allow(monkeypatch):
    monkeypatch.setattr(liveness.Network, "available", lambda: False)
    lacking = [name for name, row in ROWS.items() if liveness.missing(row)]
    assert lacking == ["healed-cut", "halves", "pair", "pair-kill", "etcd-cut"]
    monkeypatch.setattr(liveness.Network, "available", lambda: True)
    monkeypatch.setattr(liveness.EtcdServer, "program", lambda: None)
    assert [name for name, row in ROWS.items() if liveness.missing(row)] == ["etcd-cut"]


# --- what counts as training again ---------------------------------------------------------------


def world(number, size, began, ended, pid=0):
    """The steps of a world, one each 0.1 s, by all its ranks, in seconds from now."""
    return [
        Step(number, size, number, rank, pid + 10 * number + rank, step, at - 0.1, at)
        for step, at in enumerate(began + 0.1 * each for each in range(round((ended - began) * 10)))
        for rank in range(size)
    ]


def told(*steps, size=2):
    """What is made of a fault at 10 s before now, in a job whose world 0 ended then."""
    history = History()
    now = time.monotonic()
    for each in steps:
        history.add(replace(each, began=now + each.began, finished=now + each.finished))
    job = SimpleNamespace(
        history=history,
        launcher=OURS,
        nodes=[SimpleNamespace(process=SimpleNamespace(poll=lambda: None))],
        wait_for=lambda probe, seconds: probe() or None,
        worlds=lambda known: [],
        last_words=lambda: "",
        output=lambda: "",
    )
    return recovered(job, now - 10.0, size, known={0})


BEFORE = world(0, 3, -20.0, -10.0)


def test_the_time_runs_to_the_next_step_and_to_one_of_all():
    found = told(*BEFORE, *world(1, 1, -8.0, -6.0), *world(2, 2, -5.0, 5.0))
    assert found.seconds == pytest.approx(2.0)
    assert found.details["whole"] == pytest.approx(5.0)
    assert found.note == ""


@pytest.mark.parametrize(
    ("steps", "note"),
    [
        ([], "no step within 45 s"),
        (world(1, 1, -8.0, 5.0), "no world of 2 within 45 s"),
        (world(1, 2, -8.0, -6.0), "no world of 2 trained for 2 s"),
        (world(1, 2, -1.0, 0.5), "no world of 2 trained for 2 s"),
        (world(1, 2, -8.0, 5.0) + world(2, 1, -5.0, -4.0), SPLIT),
        (world(1, 2, -8.0, 5.0) + world(1, 2, -8.0, 5.0, pid=5), SPLIT),
        (world(2, 2, -8.0, -6.0) + world(1, 2, -5.0, 5.0), "of generation 1 on process 10, after"),
    ],
    ids=[
        "nobody",
        "one alone",
        "no more",
        "not long",
        "two worlds",
        "two of one number",
        "an older world",
    ],
)
def test_liveness_result_that_does_not_pass_says_why(steps, note):
    found = told(*BEFORE, *steps)
    assert found.seconds is None
    assert note in found.note
