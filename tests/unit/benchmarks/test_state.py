"""The parts of `state.py` that need no agents: what is wanted, when it is met, and the report."""

from __future__ import annotations

import pytest

from benchmarks.harness import state_bars as bars
from benchmarks.harness import state_rows as rows
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.state_report import milliseconds, render
from benchmarks.harness.state_results import StateResults
from benchmarks.harness.summary import Summary
from benchmarks.sizes import SIZES
from benchmarks.state import QUICK, WHOLE

ABOUT = {"date": "today", "commit": "c", "torch": "2", "python": "3", "cores": 2, "cpu": "x"}
NOTHING = Summary(())


def summary(*seconds):
    return Summary(seconds)


def results():
    """A run of every row: each time is what it is measured against, and a tenth."""
    made = StateResults(dict(ABOUT), bytes=1_000_000_000)

    def add(row, who, seconds, **details):
        made.add(row, who, Repetition(seconds, details=details))

    for who in (rows.SNAPSHOT, rows.HIDDEN, rows.BACK_TO_BACK):
        add(rows.BLOCKED, who, 0.11, commit=0.01, wait=0.1)
    add(rows.BLOCKED, rows.COPY, 0.1)
    add(rows.SHARDED, rows.SNAPSHOT, 0.13, commit=0.01, wait=0.12)
    add(rows.SHARDED, rows.VOTE_AND_COPY, 0.12)
    add(rows.SHARDED, rows.COPY, 0.1)
    for row in (rows.OVERHEAD, rows.ONE_CORE):
        made.settings[row] = {"copy": 0.1, "step": 2.2, "batch": 64, "free": 1.0}
        add(row, rows.IN_A_STEP, 0.002, commit=0.001, wait=0.001, sealed=1)
        made.pairs[f"{row}, every step"] = [(1.10, 1.0), (1.101, 1.0)]
        made.pairs[f"{row}, every step, A/A"] = [(1.0, 1.0), (1.01, 1.0)]
    made.pairs["overhead, every 10 steps"] = [(1.001, 1.0), (1.002, 1.001)]
    saved = (rows.OURS_SAVED, rows.TORCH_SAVE, *rows.DCP_SAVED)
    for row in (rows.CHECKPOINT, rows.CHECKPOINT_ALONE, rows.FIRST_CHECKPOINT):
        ours = 0.3 if row == rows.CHECKPOINT_ALONE else 0.1
        for who, seconds in zip(saved, (ours, 2, 1, 0.3, 0.2, 0.25), strict=True):
            add(row, who, seconds, call=seconds, stored=3.0)
    add(rows.RESTORE, rows.OWN_MEMORY, 0.11)
    for who in (rows.MEMCPY, rows.MEMCPY_FRESH, *rows.LOADED):
        add(rows.RESTORE, who, 0.1)
    add(rows.PEER, rows.FROM_PEER, 0.8, opened=0.1)
    add(rows.PEER, rows.CARRIED, 0.2)
    add(rows.PEER, rows.SOCKET, 0.5)
    add(rows.PEER, rows.SOCKET_FRESH, 0.7)
    return made


def test_so_many_copies_at_most():
    for ours, copy, met in (
        (summary(0.12), summary(0.1), True),
        (summary(0.121), summary(0.1), False),
        (summary(0.1, 0.1, 9.0), summary(0.1), True),
        (NOTHING, summary(0.1), None),
        (summary(0.1), NOTHING, None),
    ):
        assert bars.in_copies(ours, copy, 1.2, "a copy").met is met, (ours, copy)


def test_an_overhead_is_judged_by_its_interval():
    for pairs, met in (
        ([(1.01, 1.0), (1.012, 1.0), (1.011, 1.0)], True),
        ([(1.10, 1.0), (1.11, 1.0), (1.12, 1.0)], False),
        ([(1.00, 1.0), (1.10, 1.0), (1.03, 1.0)], None),  # the interval has the limit in it
        ([(1.10, 1.0)], None),
        ([], None),
    ):
        assert bars.overhead(pairs, 0.05, copies=22, free=1.0).met is met, pairs
    # It proves nothing where the promise does not hold.
    for copies, free, why in ((19, 1.0, "shorter than 20 copies"), (22, 0.3, "no core was free")):
        bar = bars.overhead([(1.0, 1.0), (1.001, 1.0)], 0.05, copies=copies, free=free)
        assert bar.met is None
        assert why in bar.wanted


def test_others_are_held_against_it():
    for ours, theirs, met in ((0.1, summary(1.0), True), (0.11, summary(1.0), False)):
        assert bars.less_than_saving(summary(ours), theirs).met is met
    assert bars.less_than_saving(summary(0.1), NOTHING).met is None
    for ours, met in ((0.2, True), (0.21, False)):
        assert bars.not_more(summary(ours), [summary(1.0), summary(0.2), NOTHING]).met is met
    for ours, met in ((0.8, True), (0.9, False)):
        assert bars.bandwidth_share(summary(ours), summary(0.5)).met is met


def test_the_report_has_every_row_and_its_verdict():
    text = render(results())

    def line(beginning):
        return next(each for each in text.splitlines() if each.startswith(f"| {beginning}"))

    assert line("blocked per snapshot, nothing").endswith("1.10 | at most 1.2 times a copy: met |")
    sharded = line("blocked per snapshot, FSDP2")
    assert sharded.endswith("1.30 | at most 1.2 times a copy: **missed** |")
    assert "steps of 22 copies" in line("overhead of a snapshot every step")
    assert "**missed**" in line("overhead of a snapshot every step, steps")
    assert line("overhead of a snapshot every step, A/A").endswith("reported |")
    assert line("overhead of a snapshot every step, no free core").endswith("reported |")
    assert line("overhead of a snapshot every 10 steps, steps").endswith("up to 1%: met |")
    assert "at least 10 times less: met" in line("blocked per checkpoint, behind forward and")
    assert "at least 10 times less: **missed**" in line("blocked per checkpoint, nothing to hide")
    assert text.count("not more than the best of DCP's: met") == 1
    assert text.count("not more than the best of DCP's: **missed**") == 1
    assert line("restore from own memory").endswith("at most 1.3 times it: met |")
    assert "1.25 GB/s" in line("restore from a peer's memory")
    assert "of its bandwidth: met" in line("restore from a peer's memory")
    assert line("from the memory of an agent").endswith("reported |")
    assert "1.00 GB/s" in line("one after the other")
    assert "**missed**" in line("one after the other")
    assert "plain socket to memory of which half is new, 1.43 GB/s" in text


def test_cost_of_every_tenth_step_follows_from_one_full_copy():
    made = results()
    made.pairs["overhead, every step"] = [(1.05, 1.0), (1.06, 1.0), (1.055, 1.0)]
    beginning = "overhead of a snapshot every 10 steps, by those of single steps"
    assert f"{beginning}, steps of 22 copies" in render(made)
    assert bars.overhead(bars.every([(1.05, 1.0)] * 3, 10), 0.01, copies=22, free=1.0).met
    made.add(rows.OVERHEAD, rows.IN_A_STEP, Repetition(1, details={"sealed": 0}))
    assert beginning not in render(made)


def test_results_are_read_again_as_they_were_saved_and_any_has_a_report():
    made = results()
    assert StateResults.from_json(made.to_json()) == made
    made.failed_rows.append("peer")
    assert "no job of peer ended well" in render(made)
    nothing = StateResults(dict(ABOUT), bytes=SIZES[QUICK.size].state_bytes)
    assert "State of 84 MB" in render(nothing)


def test_the_sizes_are_a_look_and_a_gigabyte():
    assert SIZES[WHOLE.size].state_bytes == pytest.approx(1e9, rel=0.01)
    # Beyond the sizes from which snapshots are checked later, and a process writes checkpoints.
    assert SIZES[QUICK.size].state_bytes > 64 << 20


def test_milliseconds():
    for seconds, text in (
        ((0.001234,), "1.23 ms (1.23 to 1.23)"),
        ((0.0312, 0.028, 0.0401), "31.2 ms (28.0 to 40.1)"),
        ((1.5, 1.5), "1,500 ms (1,500 to 1,500)"),
        ((), "not measured"),
    ):
        assert milliseconds(Summary(seconds)) == text
