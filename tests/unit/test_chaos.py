"""The chaos test is itself a test subject: its schedule keeps its word, its judge sees all."""

from __future__ import annotations

import copy
import itertools

import pytest

from tests.process import chaos_cuts
from tests.process.chaos_record import compare, judge
from tests.process.chaos_schedule import KINDS, LOSING, MOST_NODES, NEED_ENOUGH, NODES, schedule
from tests.support import SOAK
from torchelastic.data.verdict import Line

SAMPLES = 8


@pytest.mark.parametrize("mode", ["script", "train"])
@pytest.mark.parametrize("seed", range(5 * SOAK))
def test_a_schedule_has_all_faults_and_keeps_enough_nodes(seed, mode):
    faults = schedule(seed, mode)
    assert faults == schedule(seed, mode) != schedule(seed + 1, mode)
    assert len(faults) >= 50
    assert {kind: sum(fault.kind == kind for fault in faults) for kind in KINDS} == KINDS
    steps = [fault.at_step for fault in faults]
    assert steps == sorted(set(steps))
    nodes = NODES
    for fault in faults:
        assert nodes >= 3 or fault.kind not in NEED_ENOUGH
        nodes += (fault.kind == "join") - (fault.kind in LOSING)
        assert 2 <= nodes <= MOST_NODES


def test_the_cuts_of_a_seed_are_of_all_kinds_and_leave_no_host_on_two_sides():
    made = [cut for seed in range(30) for cut in chaos_cuts.cuts(seed, 6)]
    assert made == [cut for seed in range(30) for cut in chaos_cuts.cuts(seed, 6)]
    hosts = [[host for side in cut.sides for host in side] for cut in made]
    assert all(len(set(each)) == len(each) for each in hosts)
    assert {len(each) for each in hosts} == {2, chaos_cuts.NODES}
    assert {(cut.how, cut.one_way, cut.times > 1) for cut in made} == set(
        itertools.product(("drop", "reset"), (True, False), (True, False))
    )
    # The first node, which hosts or leads at the start, is on the small and on the large side.
    assert {len(side) for cut in made for side in cut.sides if 1 in side} == {1, 2, 3, 4}


# --- the judge ------------------------------------------------------------------------------------


def history() -> list[dict]:
    """Two ranks and an epoch of four steps; step 2 is done again, by one rank, in generation 1."""
    lines: list[dict] = []
    for generation, size, steps in ((0, 2, (0, 1, 2)), (1, 1, (2, 3))):
        for step in steps:
            for rank in range(size):
                who = {"generation": generation, "step": step, "rank": rank, "size": size}
                share = 2 // size
                begin = 2 * step + rank * share
                items = [[sample, generation, sample] for sample in range(begin, begin + share)]
                lines += [{"event": "item", "pid": 7, "item": item} for item in items]
                before = f"after {step - 1}"
                lines.append({"event": "used", "pid": 7, "items": items, "before": before, **who})
                # Rank 1 was killed in step 2 of generation 0: nobody has finished that one there.
                if (generation, step) != (0, 2):
                    at = len(lines)
                    done = {"event": "done", "hash": f"after {step}", "at": at, "pid": 7}
                    lines.append({**done, **who})
    lines.append({"event": "end", "pid": 7, "step": 4, "epoch": 1, "counts": [1.0] * SAMPLES})
    return lines


def verdict(lines) -> list[str]:
    return judge(lines, samples=SAMPLES, mode="train")


def find(lines, event, **wanted):
    """The only such line."""
    wanted |= {"event": event}
    (found,) = [line for line in lines if all(line.get(key) == wanted[key] for key in wanted)]
    return found


def test_a_history_in_which_a_step_is_redone_is_in_order():
    assert verdict(history()) == []


def test_checker_allows_a_leaver_to_finish_the_base_step_late():
    lines = history()
    find(lines, "done", generation=0, step=1, rank=1)["at"] = 1000
    assert verdict(lines) == []


def used(lines, generation, step, **wanted):
    return find(lines, "used", generation=generation, step=step, **wanted)


def use_twice(lines):
    used(lines, 1, 3)["items"][0] = [0, 1, 0]
    lines.append({"event": "item", "pid": 7, "item": [0, 1, 0]})


def leave_a_step_out(lines):
    for event in ("used", "done"):
        lines.remove(find(lines, event, generation=1, step=2))


def finish_in_the_old_world_later(lines):
    """Step 2, which the new world has done."""
    done = find(lines, "done", generation=0, step=1, rank=0)
    lines.append({**done, "step": 2, "at": 1000})


def go_back_too_far(lines):
    """To step 1, which both ranks had finished."""
    for event in ("used", "done"):
        made = copy.deepcopy(find(lines, event, generation=0, step=1, rank=0))
        made |= {"generation": 1, "size": 1, "at": 20}
        if event == "used":
            made["items"] += used(lines, 0, 1, rank=1)["items"]
        lines.append(made)


#: What a history is spoilt by, and what is said of it.
SPOILT = {
    "samples [5] are missing": lambda it: used(it, 1, 2)["items"].pop(),
    "sample 0 was used in steps [0, 3]": use_twice,
    "which its dataset has not handed out": lambda it: used(it, 1, 3).update(items=[[6, 1, 99]]),
    "one item of sample 0 was used in rank 0 in step 0": (
        lambda it: used(it, 1, 3).update(items=[[0, 0, 0]])
    ),
    "step 1 of generation 0: ranks [0] of 2 have used samples": (
        lambda it: it.remove(used(it, 0, 1, rank=1))
    ),
    "step 1 of generation 0: parameters differ by rank": (
        lambda it: find(it, "done", generation=0, step=1, rank=1).update(hash="odd")
    ),
    "step 2 of generation 1 does not begin with what step 1": (
        lambda it: used(it, 1, 2).update(before="after 0")
    ),
    "nobody has finished step 2": leave_a_step_out,
    "step 2 of generation 0 on 0, after a step of generation 1": finish_in_the_old_world_later,
    "generation 1 begins with step 1 on 0, but step 1 was finished": go_back_too_far,
    "has counted {3: 2.0}": lambda it: find(it, "end")["counts"].__setitem__(3, 2.0),
    "nobody has come to the end": lambda it: it.remove(find(it, "end")),
}


@pytest.mark.parametrize("said", SPOILT)
def test_checker_names_the_broken_law(said):
    lines = history()
    SPOILT[said](lines)
    found = verdict(lines)
    assert any(said in sentence for sentence in found), found


def test_the_ledger_is_held_against_the_record():
    line = Line(generation=0, step=1, rank=1, epoch=0, ids=(1,))
    assert compare(history(), [line]) == []
    wrong = Line(generation=0, step=1, rank=1, epoch=0, ids=(2,))
    assert "used [2] by the ledger" in compare(history(), [wrong])[0]
