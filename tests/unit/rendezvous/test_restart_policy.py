"""The restart budget, and when a job gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.events.failure import Failure
from torchelastic.rendezvous.restart_policy import (
    LONGEST_PAUSE,
    PROGRESS_AFTER,
    SAME_FAILURE_LIMIT,
    START_FAILURE_TIME,
    Ending,
    RestartHistory,
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
    place="train.py:3 in step",
)
KILLED = replace(BOOM, exitcode=-9, message="killed by SIGKILL", traceback="")


def judged(kind="failure", history=None, budget=3, count_resizes=False, **ending):
    ending = {"lifetime": 60.0, **ending}
    return judge(
        Ending(kind=kind, **ending),
        history or RestartHistory(),
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
def test_restart_is_charged_by_the_kind_of_the_end(kind, count_resizes, used):
    verdict = judged(kind, count_resizes=count_resizes)
    assert verdict.go_on
    assert verdict.history.used == used


def test_one_restart_is_singular():
    assert judged(budget=3).sentence == "1 of 3 restarts used"
    assert judged(budget=1).sentence == "1 of 1 restart used"


def test_the_budget_ends():
    verdict = judged(history=RestartHistory(used=3))
    assert not verdict.go_on
    assert verdict.sentence == "all 3 restarts used (--max-restarts)"
    assert not judged(history=RestartHistory(used=3, best_step=7), step=7).go_on, "no progress"
    one = judged(history=RestartHistory(used=1), budget=1)
    assert one.sentence == "the only restart is used (--max-restarts)"


LONG = PROGRESS_AFTER
SILENT = replace(BOOM, exitcode=3, message="exit code 3", traceback="", place="")
STARVED = replace(
    KILLED,
    message="killed by SIGKILL: out of memory",
    hint="out of memory: the kernel killed it (limit 2.0 GiB)",
)
PEER = replace(BOOM, message="RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection refused")
SERVER = replace(BOOM, message="ConnectionResetError: Connection reset by peer")


@pytest.mark.parametrize(
    ("known", "ending", "used"),
    [
        (7, {"step": 8, "failure": BOOM}, 1),
        (7, {"step": 7, "failure": BOOM}, 4),
        (7, {"step": 7, "failure": BOOM, "lifetime": LONG}, 4),
        (7, {"step": 7, "failure": KILLED, "lifetime": LONG}, 4),
        (-1, {"failure": BOOM, "lifetime": LONG}, 4),
        (-1, {"failure": SILENT, "lifetime": LONG}, 1),
        (-1, {"failure": KILLED, "lifetime": LONG}, 1),
        (-1, {"failure": KILLED, "lifetime": LONG - 1}, 4),
        (-1, {"failure": PEER, "lifetime": LONG}, 1),
        (-1, {"kind": "resize", "lifetime": LONG}, 0),
        (-1, {"kind": "resize", "lifetime": LONG - 1}, 3),
    ],
)
def test_progress_refills_the_budget_and_time_only_where_nothing_is_known(known, ending, used):
    verdict = judged(history=RestartHistory(used=3, best_step=known), budget=9, **ending)
    assert (verdict.go_on, verdict.history.used) == (True, used)


def fall(*endings, budget=100):
    """How many of these endings a job survives, and the last verdict: `(failure, lifetime, step)`,
    the step being the best that any worker has reported."""
    history = RestartHistory()
    for count, (failure, lifetime, step) in enumerate(endings):
        ending = {"failure": failure, "lifetime": lifetime, "step": step}
        verdict = judged(history=history, budget=budget, **ending)
        if not verdict.go_on:
            return count, verdict.sentence
        history = verdict.history
    return len(endings), verdict.sentence


HOURS = 7200.0
OTHER = replace(BOOM, message="ValueError: another text, 17")
ELSEWHERE = replace(BOOM, place="train.py:9 in step")
KEY = replace(BOOM, message="KeyError: 1")
MANY = 3 * SAME_FAILURE_LIMIT


@pytest.mark.parametrize(
    ("endings", "survived"),
    [
        ([(BOOM, 1.0, -1)] * MANY, 4),
        ([(BOOM, 11.0, -1)] * MANY, 4),
        ([(BOOM, HOURS, -1)] * MANY, 4),
        ([(BOOM, 1.0, -1), (OTHER, HOURS, -1)] * MANY, 4),
        ([(BOOM, 1.0, -1), (ELSEWHERE, 1.0, -1)] * MANY, 2 * MANY),
        ([(BOOM, 1.0, -1), (KEY, 1.0, -1)] * MANY, 2 * MANY),
        ([(BOOM, HOURS, 7)] * MANY, 4),
        ([(BOOM, 1.0, step) for step in range(MANY)], MANY),
        ([(replace(BOOM, step=step), HOURS, -1) for step in range(MANY)], MANY),
        ([(replace(BOOM, step=7), 60.0, -1)] * MANY, 4),
        ([(BOOM, 1.0, 7)] * 5 + [(BOOM, 1.0, 8)] * 5, 4),
        ([(BOOM, 1.0, 7)] * 4 + [(BOOM, 1.0, 8)] * 5, 8),
        ([(BOOM, 1.0, -1), (KILLED, HOURS, -1)] * MANY, 8),
        ([(BOOM, 1.0, -1), (PEER, 1.0, -1)] * MANY, 8),
        ([(KILLED, 1.0, -1)] * MANY, MANY),
        ([(KILLED, HOURS, -1)] * 200, 200),
        ([(KILLED, 60.0, -1)] * 200, 100),
        ([(PEER, 60.0, -1)] * MANY, MANY),
        ([(SERVER, 60.0, -1)] * MANY, MANY),
        ([(SILENT, 60.0, -1)] * MANY, 4),
        ([(SILENT, HOURS, -1)] * 200, 200),
        ([(SILENT, HOURS, 7)] * MANY, 4),
        ([(STARVED, 0.5, -1)] * MANY, 4),
        ([(STARVED, HOURS, -1)] * MANY, MANY),
        ([(None, 1.0, -1)] * MANY, MANY),
    ],
    ids=[
        "an error at once",
        "an error after 11 s",
        "an error after hours, without steps",
        "the same error with another text",
        "the same error elsewhere",
        "another error",
        "no step beyond the first failure",
        "always a step further",
        "at another step each time, as torch counts them",
        "at the same step each time, as torch counts them",
        "no step further for five times",
        "a step further after four times",
        "kills between the errors",
        "lost peers between the errors",
        "killed from outside",
        "killed from outside after hours, without steps",
        "killed from outside until the budget is spent",
        "lost peers",
        "a server of the user's is gone",
        "exit code",
        "exit code after hours, without steps",
        "exit code after hours, without a step further",
        "out of memory",
        "out of memory after hours, without steps",
        "no worker's failure",
    ],
)
def test_the_same_failure_five_times_without_progress_ends_the_job(endings, survived):
    assert fall(*endings)[0] == survived


def test_the_last_sentence_names_the_place_and_the_step():
    at_seven = replace(BOOM, step=7)
    for failure, said in [
        (BOOM, "same error 5 times without progress (train.py:3 in step); giving up"),
        (at_seven, "same error 5 times without progress (train.py:3 in step, step 7); giving up"),
        (SILENT, "same failure 5 times without progress; giving up"),
    ]:
        assert fall(*[(failure, 60.0, -1)] * 5)[1] == said


OSERROR = replace(BOOM, message="OSError: [Errno 5] Input/output error")
CAUSED = replace(
    BOOM,
    message="RuntimeError: no data",
    traceback="requests.exceptions.ConnectTimeout: 10 s\n\nTraceback …\nRuntimeError: no data",
)


@pytest.mark.parametrize(
    ("failure", "ending", "known", "survived"),
    [
        (BOOM, {}, -1, 1),
        (BOOM, {"all_ranks": False}, -1, 4),
        (BOOM, {"trained": True}, -1, 4),
        (BOOM, {}, 7, 4),
        (replace(BOOM, step=3), {}, -1, 4),
        (OSERROR, {}, -1, 4),
        (CAUSED, {}, -1, 4),
        (SERVER, {}, -1, MANY),
    ],
    ids=[
        "before the first step",
        "not on all ranks",
        "after the job trained",
        "after a known step",
        "after a step that torch counted",
        "an error that time may cure",
        "an error that a timeout caused",
        "a lost connection",
    ],
)
def test_restart_same_exception_on_all_ranks_ends_the_job_the_second_time(
    failure, ending, known, survived
):
    history, count = RestartHistory(best_step=known), 0
    while count < MANY:
        given = {"all_ranks": True, "failure": failure, "lifetime": 9.0} | ending
        verdict = judged(history=history, budget=100, **given)
        if not verdict.go_on:
            break
        history, count = verdict.history, count + 1
    assert count == survived, verdict.sentence


@pytest.mark.parametrize(
    ("message", "passing"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data'", True),
        ("TimeoutError", True),
        ("subprocess.TimeoutExpired: Command 'x' timed out", True),
        ("botocore.exceptions.EndpointConnectionError: Could not connect", True),
        ("urllib.error.HTTPError: HTTP Error 503: Service Unavailable", True),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", True),
        ("ValueError: OSError: no", False),
        ("KeyError: 'timeout'", False),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_failure_of_the_system_or_a_timeout_may_pass(message, passing):
    assert replace(BOOM, message=message, traceback=f"Traceback …\n{message}").passing is passing
    assert not replace(BOOM, message=message, traceback="").passing


INCURABLE = replace(BOOM, message="ModuleNotFoundError: No module named 'x'")


def signed(failure):
    return repr((*failure.signature(), failure.step))


NOTED = RestartHistory(signature=signed(INCURABLE), repeats=1)


@pytest.mark.parametrize(
    ("ending", "history", "go_on"),
    [
        ({"everywhere": True, "trained": True}, RestartHistory(), False),
        ({"everywhere": False, "trained": True}, RestartHistory(), True),
        ({"everywhere": False, "trained": True, "without": True}, NOTED, True),
        ({"everywhere": False}, RestartHistory(), False),
        ({"everywhere": False, "without": True}, RestartHistory(), True),
        ({"everywhere": False, "without": True}, NOTED, False),
    ],
    ids=[
        "on every node",
        "on some, after others have trained",
        "on some again, after others have trained",
        "on some that the job needs",
        "on some that the job can do without",
        "on some, then on others",
    ],
)
def test_incurable_error_ends_the_job_unless_other_nodes_can_run_it(ending, history, go_on):
    verdict = judged(history=history, failure=INCURABLE, **ending)
    assert verdict.go_on == go_on
    assert go_on or verdict.sentence == "a restart cannot fix this ModuleNotFoundError; giving up"


@pytest.mark.parametrize(
    ("message", "fields", "incurable"),
    [
        ("SyntaxError: invalid syntax", {}, True),
        ("IndentationError: unexpected indent", {}, True),
        ("ImportError: cannot import name 'x'", {}, True),
        ("ConfigError: give batch_size or policy.", {"alive": True}, True),
        ("ValueError: ImportError", {}, False),
        ("ImportError", {"traceback": ""}, False),
    ],
)
def test_incurable_errors_are_recognized(message, fields, incurable):
    failure = replace(BOOM, message=message, **fields)
    verdict = judged("error" if failure.alive else "failure", failure=failure)
    assert failure.incurable == incurable == (not verdict.go_on)


FIVE_TIMES = {"repeats": 4, "used": 4}


@pytest.mark.parametrize(
    ("kind", "failure", "history", "incurable"),
    [
        ("failure", replace(BOOM, fatal=True), RestartHistory(), True),
        ("failure", INCURABLE, RestartHistory(), True),
        ("failure", BOOM, RestartHistory(signature=signed(BOOM), **FIVE_TIMES), True),
        ("error", BOOM, RestartHistory(signature=signed(BOOM)), True),
        # Another machine may have the memory or the driver that this one lacks.
        ("failure", SILENT, RestartHistory(signature=signed(SILENT), **FIVE_TIMES), False),
        ("failure", BOOM, RestartHistory(used=100), False),
    ],
    ids=["fatal", "ImportError", "same error", "error after rollback", "exit code", "budget"],
)
def test_incurable_ends_are_marked(kind, failure, history, incurable):
    verdict = judged(kind, failure=failure, history=history, budget=100)
    assert (verdict.go_on, verdict.incurable) == (False, incurable), verdict.sentence


# --- worlds that fail as soon as they begin ------------------------------------------------------

LOST = replace(BOOM, message="lost a peer: connection refused", traceback="")
ANOTHER = replace(LOST, message="lost a peer: connection reset")


def pauses(*endings):
    """Seconds before each next generation, after these."""
    history, found = RestartHistory(), []
    for number, (kind, lifetime, step) in enumerate(endings):
        failure = (LOST, ANOTHER)[number % 2] if kind in ("failure", "error") else None
        verdict = judged(
            kind, history=history, budget=100, lifetime=lifetime, step=step, failure=failure
        )
        assert verdict.go_on, verdict
        history = verdict.history
        found.append(pause(history))
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
        ([("failure", START_FAILURE_TIME, -1)] * 3, [0, 0, 0]),
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
    assert pause(RestartHistory(in_vain=10**6)) == LONGEST_PAUSE
