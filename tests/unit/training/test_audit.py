"""Audits: which micro-batches are repeated by whom, and which rank is wrong."""

import pytest
from torch import nn

from torchelastic import Guard, TorchState
from torchelastic.data import BatchPolicy
from torchelastic.errors import ConfigError
from torchelastic.training.audit import Audit, Judgement, judge, plan

PLACE = (0, 7, 0)
RUNS = [range(0, 3), range(3, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("runs", "rate", "new", "expected"),
    [
        (RUNS, 0.0, [], []),
        ([range(8)], 1.0, [0], []),
        (RUNS, 0.0, [1], [Audit(0, 0, (1,))]),
        (RUNS, 0.0, [0, 2], [Audit(3, 1, (0, 2))]),
        # The first world: all repeat one.
        (RUNS, 0.0, [0, 1, 2], [Audit(0, 0, (1, 2))]),
        # An interrupted step of which only new workers run a rest.
        ([[], [], [5]], 0.0, [1, 2], [Audit(5, 2, (0, 1))]),
        ([[], [], []], 1.0, [2], []),
    ],
)
def test_plan_lets_new_workers_repeat_a_micro_batch_of_an_old_one(runs, rate, new, expected):
    assert plan(PLACE, runs, rate, new) == expected


def test_plan_at_rate_1_repeats_every_micro_batch_on_another_rank():
    found = plan(PLACE, RUNS, 1.0, [])
    assert [one.number for one in found] == list(range(8))
    assert all(len(one.others) == 1 and one.owner not in one.others for one in found)


def test_plan_draws_at_the_rate_and_chooses_all_others():
    found = [one for step in range(500) for one in plan((0, step, 0), RUNS, 0.1, [])]
    assert 340 < len(found) < 460  # of 4000
    assert {one.ranks for one in found} == {(a, b) for a in range(3) for b in range(3) if a != b}


@pytest.mark.parametrize(
    ("before", "after", "new", "wrong"),
    [
        # Once: it is right when it repeats.
        ({0: 9, 1: 5}, [5, 5, 5], [], [0]),
        ({0: 5, 1: 9}, [5, 5, 5], [], [1]),
        # Always.
        ({0: 9, 1: 5}, [9, 5, 5], [], [0]),
        ({0: 5, 1: 9}, [5, 9, 5], [], [1]),
        ({0: 5, 1: 9}, [5, 9, 5, 9, 5], [], [1, 3]),
        # Newcomers of another kind are more than the others.
        ({0: 5, 1: 9, 2: 9}, [5, 9, 9], [1, 2], [1, 2]),
        ({0: 5, 1: 9}, [5, 9], [1], [1]),
        # Two: one that contradicts itself.
        ({0: 5, 1: 9}, [5, 5], [], [1]),
        ({0: 5, 1: 9}, [6, 9], [], [0]),
        ({0: 5, 1: 9}, [6, 9], [1], [0]),
        # Not known.
        ({0: 5, 1: 9}, [5, 9], [], []),
        ({0: 5, 1: 9}, [5, 9], [0, 1], []),
        ({0: 5, 1: 9}, [5, 9, 5, 9], [], []),
    ],
)
def test_judge_names_the_ranks_that_are_wrong(before, after, new, wrong):
    assert judge(before, after, new) == Judgement(tuple(wrong))


@pytest.mark.parametrize("after", [[6, 8], [6, 8, 7], [6, 9, 8, 5]])
def test_judge_tells_workers_that_never_repeat_their_own_bits(after):
    assert not judge({0: 5, 1: 9 if len(after) < 4 else 7}, after, []).is_repeatable


@pytest.mark.parametrize("audit", [0.0, 1.5])
def test_guard_refuses_a_wrong_rate(audit):
    with pytest.raises(ConfigError, match="part of micro-batches"):
        Guard(audit=audit)


def test_audit_without_a_fixed_batch_is_refused():
    with pytest.raises(ConfigError, match=r"BatchPolicy\.fixed"):
        TorchState(model=nn.Linear(1, 1), guard=Guard(audit=0.1))


@pytest.mark.parametrize(("other_bits", "compared"), [("refuse", True), ("warn", False)])
def test_form_has_the_threads_unless_workers_with_other_bits_are_admitted(other_bits, compared):
    policy = BatchPolicy.fixed(micro=1, count=1, other_bits=other_bits)
    form = dict(TorchState(model=nn.Linear(1, 1), policy=policy)._form())
    assert ("the number of threads" in form) is compared
    assert form["other bits"] == other_bits


def test_other_bits_is_refuse_or_warn():
    with pytest.raises(ConfigError, match="refuse or warn"):
        BatchPolicy.fixed(micro=1, count=1, other_bits="allow")
