"""Who is measured when, and how often."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.harness import processes, scenarios
from benchmarks.harness.cold_start import Comparison, measure_pairs
from benchmarks.harness.job import Job
from benchmarks.harness.launchers import FAST, OURS, SAFE, STOCK, TORCHRUN
from benchmarks.harness.scenarios import Attempt, attempts, failed, interleave, quiet_seconds
from benchmarks.recovery import counts


def test_launchers_alternate_until_each_has_its_count():
    blocks = [(each.name, list(numbers)) for each, numbers in interleave([(OURS, 5), (SAFE, 3)], 2)]
    assert blocks == [
        (OURS.name, [0, 1]),
        (SAFE.name, [0, 1]),
        (OURS.name, [2, 3]),
        (SAFE.name, [2]),
        (OURS.name, [4]),
    ]


def test_faults_come_at_many_phases_of_a_heartbeat():
    delays = sorted(quiet_seconds(index) for index in range(10))
    assert delays[0] >= 2
    assert delays[-1] <= 4
    assert max(b - a for a, b in pairwise(delays)) < 0.6


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (scenarios.WORKER, {OURS.name: 10, SAFE.name: 10, FAST.name: 4, STOCK.name: 1}),
        (scenarios.NODE, {OURS.name: 10, SAFE.name: 5, FAST.name: 10, STOCK.name: 1}),
        (scenarios.GROW, {OURS.name: 20, SAFE.name: 10, FAST.name: 4, STOCK.name: 1}),
    ],
)
def test_the_better_setting_of_torchrun_gets_all_repetitions(scenario, expected):
    found = {launcher.name: count for launcher, count in counts(scenario, 10, 1)}
    assert found == expected


def test_pairs_alternate_their_order_and_keep_their_sides():
    started = []

    def measure(launcher, workers):
        started.append(launcher.name)
        return float(len(started))

    pairs = list(measure_pairs(Comparison("x", OURS, TORCHRUN, 2), 2, measure))
    ours, theirs = OURS.name, TORCHRUN.name
    assert started == [ours, theirs, ours, theirs, theirs, ours]  # the first two warm the cache
    assert pairs == [(3.0, 4.0), (6.0, 5.0)]


def test_a_failed_start_shows_what_was_printed_last(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processes, "end_descendants", lambda: None)  # we have others here
    program = ["sh", "-c", "echo begun; echo 'No module named torchft' >&2; exit 3"]

    def start(job):
        for _ in range(2):
            job.start(program, {})
        job.wait_training(2, quiet=0.5)

    def fault(job, number):
        return failed(job, set(), "unused")

    [found] = attempts(Attempt(lambda: Job(OURS, parent=tmp_path), start, fault), range(1))
    assert found.note == "all nodes ended; exit code 3, last line: No module named torchft"
    shown = capsys.readouterr().err
    assert shown.count("  failed start: no world of 2 within") == scenarios.MAX_FAILED_STARTS
    assert "--- node-1.out\nbegun\nNo module named torchft" in shown


def test_command_lines():
    script = ["train.py", "--x"]
    ours = OURS.elastic("1:3", 2, "127.0.0.1:9", "job", script)
    assert " ".join(ours[1:]) == (
        "run --nnodes 1:3 --rdzv-id job --rdzv-endpoint 127.0.0.1:9 --nproc-per-node 2 train.py --x"
    )
    safe = SAFE.elastic("1:3", 2, "127.0.0.1:9", "job", script)
    assert "last_call_timeout=1" in safe
    assert SAFE.environment == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert "--rdzv-conf" not in STOCK.elastic("1:3", 2, "127.0.0.1:9", "job", script)
    assert "--nnodes" not in TORCHRUN.single(1, script)
