"""Who pays for what, and when a job gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.failure import Failure
from torchelastic.rendezvous.restart_policy import (
    AT_ONCE,
    IN_VAIN,
    LONGEST_PAUSE,
    PROGRESS_AFTER,
    SAME_FAILURE_LIMIT,
    Ending,
    RestartLedger,
    judge,
    pause,
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
    assert not judged(ledger=RestartLedger(used=3, best_step=7), step=7).go_on, "no progress"


@pytest.mark.parametrize("ending", [{"lifetime": PROGRESS_AFTER}, {"step": 8}])
def test_progress_refills_it(ending):
    verdict = judged(ledger=RestartLedger(used=3, best_step=7), **ending)
    assert verdict.go_on
    assert verdict.ledger.used == 1


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
    verdict = fall(2 * SAME_FAILURE_LIMIT, failures, lifetime)
    assert verdict.go_on
    assert failures != [KILLED] or pause(verdict.ledger) == 0, "kills from outside are no defect"


# --- worlds that fail as soon as they begin ------------------------------------------------------

LOST = replace(BOOM, message="lost a peer: connection refused", traceback="")
ANOTHER = replace(LOST, message="lost a peer: connection reset")


def pauses(*endings):
    """Seconds before each next generation, after these."""
    ledger, found = RestartLedger(), []
    for number, (kind, lifetime, step) in enumerate(endings):
        failure = (LOST, ANOTHER)[number % 2] if kind in ("failure", "error") else None
        verdict = judged(
            kind, ledger=ledger, budget=100, lifetime=lifetime, step=step, failure=failure
        )
        assert verdict.go_on, verdict
        ledger = verdict.ledger
        found.append(pause(ledger))
    return found


SOON = ("failure", 0.01, 7)


@pytest.mark.parametrize(
    ("endings", "seconds"),
    [
        ([SOON], [0]),
        ([("failure", 60.0, 7), SOON, SOON, SOON], [0, 0, 0.25, 0.5]),
        ([("failure", 0.01, -1)] * 4, [0, 0.25, 0.5, 1]),
        ([("node-failure", 0.01, -1)] * 3, [0, 0, 0]),
        ([("failure", 0.01, -1), ("node-failure", 0.01, -1)] * 2, [0, 0, 0.25, 0.25]),
        ([("error", 0.01, -1)] * 3, [0, 0.25, 0.5]),
        ([("failure", IN_VAIN, -1)] * 3, [0, 0, 0]),
        ([("leave", 0.01, -1), ("resize", 0.01, -1)] * 2, [0, 0, 0, 0]),
        ([("failure", 0.01, step) for step in range(4)], [0, 0, 0, 0]),
        ([SOON, SOON, SOON, ("failure", 0.01, 8), SOON, SOON], [0, 0, 0.25, 0, 0, 0.25]),
        ([("failure", 0.01, -1)] * 3 + [("resize", 0.01, -1)], [0, 0.25, 0.5, 0.5]),
        ([("failure", 0.01, -1)] * 3 + [("failure", 5.0, -1)], [0, 0.25, 0.5, 0]),
        ([("failure", 0.01, -1)] * 3 + [("resize", 5.0, -1)], [0, 0.25, 0.5, 0]),
    ],
    ids=[
        "once",
        "after a world that trained",
        "from the first on",
        "nodes",
        "nodes meanwhile",
        "errors",
        "they lived a while",
        "nobody failed",
        "each made a step",
        "one made a step",
        "a newcomer mends nothing",
        "one lived a while",
        "one lived until somebody came",
    ],
)
def test_the_first_retry_is_immediate_and_the_next_ones_wait_where_worlds_fail_in_vain(
    endings, seconds
):
    assert pauses(*endings) == seconds
    assert pause(RestartLedger(in_vain=10**6)) == LONGEST_PAUSE


def test_kills_for_want_of_memory_are_not_from_outside():
    hint = "out of memory: the kernel killed it (limit 2.0 GiB)"
    starved = replace(KILLED, message="killed by SIGKILL: out of memory", hint=hint)
    ledger = RestartLedger()
    for number in range(1, SAME_FAILURE_LIMIT + 1):
        verdict = judged(failure=starved, ledger=ledger, budget=100, lifetime=IN_VAIN / 2)
        ledger = verdict.ledger
        assert (ledger.repeats, verdict.go_on) == (number, number < SAME_FAILURE_LIMIT)
