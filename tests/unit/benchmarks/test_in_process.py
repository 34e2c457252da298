"""The parts of `in_process.py` that need no job."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import contestants
from benchmarks.harness.bandwidth import socket_bandwidth
from benchmarks.harness.contestants import NVRX, OURS_IN_PROCESS, TORCHFT, TORCHRUN_TUNED
from benchmarks.harness.in_process_faults import last_resorts, recovery, standstill
from benchmarks.harness.in_process_report import LARGE, SMALL, render
from benchmarks.harness.in_process_results import InProcessResults
from benchmarks.harness.job import JobFailed
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.steady import BARE, RESIDENT, Calls, Cost, calls_per_step, cost
from benchmarks.harness.worker_log import History, Step
from benchmarks.in_process import FAULTS, ROWS, counts, steady_pairs
from benchmarks.sizes import SIZES


def history(*steps):
    """Steps of (world, rank to pid, number, finished)."""
    made = History()
    for world, pids, number, finished in steps:
        for rank, pid in pids.items():
            made.add(Step(world, len(pids), world, rank, pid, number, finished - 0.01, finished))
    return made


OLD = {0: 10, 1: 11, 2: 12, 3: 13}


def recovered(new):
    made = history((1, OLD, 1, 1.0), (1, OLD, 2, 1.05), (1, OLD, 3, 1.1), (2, new, 4, 1.5))
    first = made.first_finish(after=1.2)
    return recovery(made, made.spans[1], first, 1.2, lost={13})


@pytest.mark.parametrize(
    ("new", "newcomers", "left_out", "noted"),
    [
        ({0: 10, 1: 11, 2: 12}, 0, 0, False),
        ({0: 10, 1: 11, 2: 12, 3: 14}, 1, 0, False),
        ({0: 10, 1: 11}, 0, 1, True),
        ({0: 20, 1: 21, 2: 22, 3: 23}, 4, 3, False),  # all processes are new: a restart
    ],
)
def test_first_world_after_a_fault_tells_newcomers_and_left_out(new, newcomers, left_out, noted):
    found = recovered(new)
    assert found.seconds == pytest.approx(0.3 - 0.05), "less an ordinary step"
    assert (found.details["newcomers"], found.details["left_out"]) == (newcomers, left_out)
    assert bool(found.note) is noted


@pytest.mark.parametrize(("busy", "cost", "noted"), [(0.0, 0.4, False), (0.6, 0.6, True)])
def test_a_join_costs_the_longest_pause_wherever_it_lies(busy, cost, noted):
    """An ordinary step takes 0.05; `busy` is a pause before the newcomer is admitted."""
    old = [(1, OLD, number, 0.05 * number) for number in range(4)]
    old += [(1, OLD, number, 0.05 * number + busy) for number in range(4, 8)]
    made = history(*old, (2, OLD | {4: 14}, 8, 0.8 + busy))
    first = made.first_finish(after=0.1, size=5)
    found = standstill(made, made.spans[1], first, asked=0.1)
    assert found.seconds == pytest.approx(cost)
    assert found.details["change"] == pytest.approx(0.4)
    assert ("came before the newcomer did, whose world took 0.400" in found.note) is noted


def test_an_ordinary_step_is_the_median_of_its_world():
    made = history(*((1, OLD, number, number * 0.1) for number in range(5)), (1, OLD, 6, 9.0))
    assert made.step_seconds(1) == pytest.approx(0.1)
    assert made.step_seconds(7) == 0.0


def test_last_resorts_are_counted_from_the_event_log(tmp_path):
    killed = {"type": "worker-killed", "reason": "not free 100 ms after its world was over (stuck)"}
    frozen = {**killed, "reason": "not free 100 ms after its world was over (frozen)"}
    hangs = {**killed, "reason": "no progress for 1.0 s: it does not answer"}
    (tmp_path / "run").mkdir()
    lines = [killed, frozen, hangs, {"type": "training"}]
    path = tmp_path / "run" / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_resorts(tmp_path) == 1


def test_every_row_is_measured_and_everybody_meets_the_kill():
    assert {*FAULTS, "cut", "steady"} == set(ROWS)
    assert all(counts(row, quick=False) for row in ROWS if row != "steady")
    assert counts("stop", quick=False)[0][1] == 10
    assert all(pairs >= 3 for _, pairs in steady_pairs(quick=False))
    assert {each.name for each, _ in steady_pairs(quick=True)} >= {SMALL.name, LARGE.name}
    everybody = {each.name for each in (OURS_IN_PROCESS, TORCHRUN_TUNED, NVRX, TORCHFT[2])}
    for quick, least in ((True, 1), (False, 3)):
        met = {contestant.name: count for contestant, count in counts("kill", quick)}
        assert everybody <= set(met)
        assert min(met.values()) >= least


def test_the_sizes_are_what_the_rows_call_them():
    counts = {name: size.parameters for name, size in SIZES.items()}
    assert counts["10k"] == pytest.approx(10_000, rel=0.05)
    assert counts["1m"] == pytest.approx(1_000_000, rel=0.06)
    assert counts["25m"] == pytest.approx(25_000_000, rel=0.02)
    assert SIZES["25m"].state_bytes == 8 * counts["25m"]


def test_a_peer_is_installed_once_and_without_touching_torch(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(contestants.subprocess, "run", lambda command, check: ran.append(command))
    for name in contestants.PACKAGES:
        (tmp_path / name).mkdir()
    contestants.install(tmp_path)
    assert len(ran) == 2 * len(contestants.PACKAGES)
    assert all("--target" in command for command in ran)
    assert not any(word == "torch" for command in ran for word in command)
    assert ["--no-deps" in command for command in ran] == [False, True] * len(ran[::2]), (
        "the peer comes last: each install replaces the programs of the one before"
    )
    contestants.install(tmp_path)
    assert len(ran) == 2 * len(contestants.PACKAGES)


def test_a_step_costs_what_lies_between_its_lines():
    lines = [{"t": 0.1 * n, "cpu": 0.02 * n, "collectives": 3 * n} for n in range(20)]
    found = cost([lines, lines])
    assert (found.wall, found.cpu, found.collectives) == pytest.approx((0.1, 0.02, 3.0))


def test_system_calls_between_two_lines_of_the_log():
    log = r'write(7, "{\"t\": 12.5, \"cpu\"'
    lines = [
        "restart_syscall(<... resuming interrupted futex ...>) = 0",
        log,
        "futex(0x7f, FUTEX_WAIT, 0) = 0",
        'sendto(9, "x", 1) = 1',
        log,
        "--- SIGCHLD {si_signo=SIGCHLD} ---",
        "futex(0x7f, FUTEX_WAIT, 0) = 0",
        log,
        "futex(0x7f, FUTEX_WAIT, 0) = 0",  # of a step whose end was not seen
    ]
    found = calls_per_step(lines)
    assert found.kinds == {"futex": 1.0, "sendto": 0.5, "write": 1.0}
    assert found.total == 2.5
    assert found.blocking() == 0
    with pytest.raises(JobFailed):
        calls_per_step(["futex(0x7f, FUTEX_WAIT, 0) = 0"])


def test_bytes_cross_a_socket():
    assert socket_bandwidth(1_000_000) > 0


def results():
    made = InProcessResults({"torch": "2.13.0"}, bandwidth=1e9, last_resorts=1)
    details = {"step": 0.05, "newcomers": 0, "left_out": 0, "size": 3}
    for row in ("kill", "kill-25m", "stop", "freeze", "cut", "join", "join-25m"):
        made.add(row, OURS_IN_PROCESS.name, Repetition(0.05, details=dict(details)))
    for contestant in (TORCHRUN_TUNED, *TORCHFT, NVRX):
        made.add("kill", contestant.name, Repetition(1.2, details=dict(details)))
    made.add("join", TORCHRUN_TUNED.name, Repetition(None, "not admitted within 45 s"))
    made.steady["10 k parameters"] = [(Cost(2e-3, 5.1e-4, 1), Cost(2e-3, 5e-4, 1))] * 2
    made.calls = {RESIDENT: Calls(5, {"futex": 5.0}), BARE: Calls(4, {"futex": 4.0})}
    return made


def test_the_report_judges_every_row():
    text = render(results())
    assert "24.0 times faster | at least 30 times faster: **missed** |" in text
    assert "24.0 times faster | at least 10 times faster: met |" in text
    assert "24.0 times faster | at least 5 times faster: met |" in text
    assert "median under 100 ms: met" in text
    assert "worst within limit 1 s + 150 ms: met" in text
    assert text.count("worst within lease 3 s + 300 ms: met") == 2
    assert "+10 us (+10 to +10) | at most 50 us of thread CPU time more: met |" in text
    assert "+1.0 | at most 2 system calls more, none that blocks: met |" in text
    assert "not admitted within 45 s" in text
    assert "nothing else freed them: 1" in text
    assert NVRX.note in text


def test_results_survive_being_saved():
    made = results()
    again = InProcessResults.from_json(made.to_json())
    assert again == made
    assert render(again) == render(made)
    assert "torch" in render(InProcessResults({"torch": "2.13.0"}))
