"""Who pays for what, and when a job gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.failure import Failure
from torchelastic.rendezvous.restart_policy import (
    AT_ONCE,
    PROGRESS_AFTER,
    SAME_FAILURE_LIMIT,
    Ending,
    RestartLedger,
    judge,
)

BOOM = Failure(
    generation=0,
    node="a",
    rank=0,
    local_rank=0,
    pid=1,
    exitcode=1,
    message="ValueError: no",
    traceback='  File "train.py", line 3, in step\nValueError: no',
)
KILLED = replace(BOOM, exitcode=-9, message="killed by SIGKILL", traceback="")


def judged(kind="failure", ledger=None, budget=3, count_resizes=False, **ending):
    ending = {"lifetime": 60.0, **ending}
    return judge(
        Ending(kind=kind, **ending),
        ledger or RestartLedger(),
        budget=budget,
        count_resizes=count_resizes,
    )


@pytest.mark.parametrize(
    ("kind", "count_resizes", "used"),
    [
        ("failure", False, 1),
        ("failure", True, 1),
        ("node-failure", False, 0),
        ("leave", False, 0),
        ("resize", False, 0),
        ("node-failure", True, 1),
        ("leave", True, 1),
        ("resize", True, 1),
    ],
)
def test_what_is_charged(kind, count_resizes, used):
    verdict = judged(kind, count_resizes=count_resizes)
    assert verdict.go_on
    assert verdict.ledger.used == used


def test_the_budget_ends():
    verdict = judged(ledger=RestartLedger(used=3))
    assert not verdict.go_on
    assert verdict.sentence == "all 3 restarts are used (--max-restarts)"


@pytest.mark.parametrize("ending", [{"lifetime": PROGRESS_AFTER}, {"step": 8}])
def test_progress_refills_it(ending):
    verdict = judged(ledger=RestartLedger(used=3, best_step=7), **ending)
    assert verdict.go_on
    assert verdict.ledger.used == 1


def test_a_step_reached_before_is_no_progress():
    assert not judged(ledger=RestartLedger(used=3, best_step=7), step=7).go_on


def fall(times, failures, lifetime=1.0):
    ledger, verdict = RestartLedger(), None
    for index in range(times):
        failure = failures[index % len(failures)]
        verdict = judged(ledger=ledger, budget=100, failure=failure, lifetime=lifetime)
        ledger = verdict.ledger
    return verdict


def test_the_same_failure_at_once_again_and_again_stops_early():
    assert fall(SAME_FAILURE_LIMIT - 1, [BOOM]).go_on
    verdict = fall(SAME_FAILURE_LIMIT, [BOOM])
    assert not verdict.go_on
    assert verdict.sentence == (
        f"the same failure came back at once {SAME_FAILURE_LIMIT} times in a row: "
        "restarting does not mend it"
    )


@pytest.mark.parametrize(
    ("failures", "lifetime"),
    [
        ([BOOM, replace(BOOM, message="KeyError: 1")], 1.0),
        ([BOOM], AT_ONCE + 1),
        ([KILLED], 1.0),
        ([None], 1.0),
    ],
    ids=["different", "later", "killed from outside", "no worker's"],
)
def test_what_is_not_the_same_failure_at_once(failures, lifetime):
    assert fall(2 * SAME_FAILURE_LIMIT, failures, lifetime).go_on
