"""Reports of benchmarks."""

from __future__ import annotations

import math

import pytest

from benchmarks.harness import bars
from benchmarks.harness.footprint import Footprint
from benchmarks.harness.launchers import FAST, OURS, OURS_NO_ZYGOTE, SAFE, TORCHRUN
from benchmarks.harness.report import best_setting, render, seconds
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.steady import Calls, Cost
from benchmarks.harness.summary import ratio_interval, student_t, summarize


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


# --- summary -------------------------------------------------------------------------------------


def test_failed_repetitions_are_counted_and_have_no_time():
    found = summarize([3.0, None, 1.0, 2.0, None])
    assert (found.count, found.failed, found.median) == (5, 2, 2.0)
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]).quartiles == (2.0, 4.0)
    assert summarize([1.5]).quartiles == (1.5, 1.5)


def test_students_t_agrees_with_the_printed_tables():
    printed = {1: 12.706, 2: 4.303, 9: 2.262, 19: 2.093, 120: 1.980}
    found = {freedom: student_t(0.975, freedom) for freedom in printed}
    assert found == pytest.approx(printed, abs=1e-3)


def test_a_constant_ratio_has_no_width():
    found = ratio_interval([(1.0, 2.0), (3.0, 6.0), (5.0, 10.0)])
    assert (found.ratio, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    found = ratio_interval([(1.0, 2.0)])  # one pair says nothing about the spread
    assert (found.low, found.high) == (0.0, math.inf)


def test_the_interval_is_students_on_the_logarithms():
    logs = [0.0, 0.1, 0.2]
    found = ratio_interval([(math.exp(log), 1.0) for log in logs])
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(0.1)
    assert math.log(found.high) - 0.1 == pytest.approx(half, rel=1e-4)
    assert 0.1 - math.log(found.low) == pytest.approx(half, rel=1e-4)


def test_swapping_numerator_and_denominator_inverts_the_interval():
    pairs = [(2.0, 1.0), (2.5, 1.1), (1.9, 1.0)]
    one = ratio_interval(pairs)
    other = ratio_interval([(b, a) for a, b in pairs])
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert one.high == pytest.approx(1 / other.low)


# --- bars ----------------------------------------------------------------------------------------


def recoveries(*each):
    """Repetitions of (seconds, newcomers in the first world)."""
    return [Repetition(seconds, details={"newcomers": count}) for seconds, count in each]


def joins(*each):
    """Repetitions of (seconds, an ordinary step)."""
    return [Repetition(seconds, details={"step": step}) for seconds, step in each]


def pair(cpu, bare_cpu, *, wall=1.0, collectives=4.0):
    return Cost(wall, cpu, collectives), Cost(wall, bare_cpu, 4.0)


def judged(bar, *rows):
    """Of rows of what a bar is given and whether it is to be met: those it judges otherwise."""
    return [row for row in rows if bar(*row[:-1]).met is not row[-1]]


def test_so_many_times_faster():
    assert not judged(
        lambda ours, theirs: bars.faster(summarize(ours), summarize(theirs), 30),
        ([0.1, 0.1], [3.0], True),
        ([0.1], [2.9], False),
        ([0.01, None], [3.0], False),  # fast, but it did not always come back
        ([0.1], [3.0, None], True),
        ([0.1], [None], None),  # never back: no number to compare with
        ([], [3.0], None),
    )
    # A recovery within the step that was due is not infinitely fast.
    assert bars.ratio(summarize([-0.01]), summarize([1.0])) == pytest.approx(1000)


def test_a_median_below_a_limit():
    assert not judged(
        lambda times: bars.median_below(summarize(times), 0.1),
        ([0.09, 0.3, 0.05], True),
        ([0.11], False),
        ([0.01, None], False),
        ([], None),
    )


def test_the_worst_counts_where_something_fell_silent():
    assert not judged(
        lambda times: bars.worst_below(summarize(times), 1.0, 0.15, "limit"),
        ([1.15, 1.0], True),
        ([1.0, 1.2], False),
        ([1.0, None], False),
        ([None], False),
        ([], None),
    )


def test_a_large_model_is_allowed_the_copies_it_needs():
    assert not judged(
        lambda repetitions: bars.large_kill(repetitions, copy=0.2),
        (recoveries((0.14, 0)), True),
        (recoveries((0.30, 0)), False),  # nothing had to move
        (recoveries((0.30, 1)), True),
        (recoveries((0.14, 0), (None, 0)), False),
        ([], None),
    )
    found = bars.beyond_copy([Repetition(None), *recoveries((0.5, 2))], copy=0.2)
    assert found.failed == 1
    assert found.times == pytest.approx((0.1,))


def test_a_join():
    assert not judged(
        lambda repetitions: bars.join(repetitions, copy=0.2),
        (joins((0.45, 0.05)), True),  # 3 steps and one and a half copies
        (joins((0.46, 0.05)), False),
        (joins((0.45, 0.05), (0.1, 0.05), (9.0, 0.05)), True),
        (joins((0.1, 0.05), (None, 0.05)), False),
        ([], None),
    )


def test_bars_show_step_cost():
    small, large = [pair(140e-6, 100e-6)], [pair(151e-6, 100e-6)]
    assert not judged(bars.cpu_time, (small, True), (large, False), ([], None))
    # Of a large step it is a share.
    assert not judged(bars.cpu_share, ([pair(0.104, 0.1)], True), ([pair(0.106, 0.1)], False))
    same, more = ([pair(0.1, 0.1, collectives=count)] for count in (4.0, 5.0))
    assert not judged(bars.collectives, (same, True), (more, False))
    assert not judged(
        lambda kinds: bars.calls(Calls(3, kinds), Calls(3, {"futex": 3.0})),
        ({"futex": 3.0}, True),
        ({"futex": 3.0, "sendto": 2.0}, True),
        ({"futex": 3.0, "sendto": 2.5}, False),
        ({"futex": 3.0, "recvfrom": 1.0}, False),  # few, but one of them waits
    )
    assert bars.calls(None, None).met is None  # without strace nothing is claimed
