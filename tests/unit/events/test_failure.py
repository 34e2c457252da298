"""A failure's way through JSON, whoever wrote it."""

import json
from dataclasses import replace

import pytest

from torchelastic.events.failure import (
    HINT_LENGTH_LIMIT,
    LINE_LENGTH_LIMIT,
    LOG_LENGTH_LIMIT,
    LOG_LINES_LIMIT,
    Failure,
    last_lines,
    node_failure,
)

FAILURE = Failure(
    generation=3,
    node="node-b",
    rank=2,
    local_rank=0,
    pid=42,
    exitcode=-9,
    message="killed by SIGKILL: out of memory",
    step=7,
    hint="out of memory: the kernel killed it (limit 2.0 GiB)",
    log_lines=("loading", "step 7"),
    collective="all_reduce #14",
    entered=14,
    waited=True,
)


def test_there_and_back_and_an_older_version_says_less_and_a_newer_one_more():
    assert Failure.from_json(json.loads(json.dumps(FAILURE.to_json()))) == FAILURE
    old = {
        name: value
        for name, value in FAILURE.to_json().items()
        if name not in ("hint", "log_lines", "collective", "entered", "waited")
    }
    read = Failure.from_json({**old, "colour": "red"})
    assert read == replace(FAILURE, hint="", log_lines=(), collective="", entered=-1, waited=False)


def test_failure_with_invalid_fields_leaves_them_out():
    wrong = {
        "rank": ["2", True],
        "exitcode": [1.5],
        "message": [["boom"], None],
        "step": ["seven"],
        "alive": ["yes"],
        "wall_time": [float("nan"), 1e300, -1],
        "hint": [3],
        "log_lines": ["one line", [3], {"0": "line"}],
        "collective": [{}],
    }
    for name, values in wrong.items():
        for value in values:
            read = Failure.from_json(FAILURE.to_json() | {name: value})
            assert read.node == "node-b"
            assert getattr(read, name) != value, name
    assert Failure.from_json({}).sentence() == "? failed: unknown error"


def test_failure_of_any_sender_is_cut_to_its_limits():
    long = FAILURE.to_json() | {"log_lines": ["x" * 10_000] * 1000, "hint": "h" * 10_000}
    read = Failure.from_json(long)
    assert len(read.hint) == HINT_LENGTH_LIMIT
    assert 0 < len(read.log_lines) <= LOG_LINES_LIMIT
    assert sum(map(len, read.log_lines)) <= LOG_LENGTH_LIMIT


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ()),
        ("\n\n \n", ()),
        ("one", ("one",)),
        ("one\ntwo\r\n", ("one", "two")),
        ("0%\r50%\r100%\ndone\n", ("0%", "50%", "100%", "done")),
        ("\x1b[31mred\x1b[0m and \x1b]0;title\x07plain", ("red and plain",)),
        ("bell\x07 and \x1bthe rest\u202e", ("bell� and �the rest�",)),
        ("a\tb", ("a       b",)),
        ("x" * 2 * LINE_LENGTH_LIMIT, ("x" * LINE_LENGTH_LIMIT,)),
        ("\n".join(map(str, range(1000))), tuple(map(str, range(1000 - LOG_LINES_LIMIT, 1000)))),
    ],
    ids=range(10),
)
def test_last_lines(text, lines):
    assert last_lines(text) == lines


def test_a_traceback_that_is_reported_is_not_reported_twice():
    traceback = 'Traceback (most recent call last):\n  File "t.py", line 1\n    f()\nE: boom\n'
    ranked = "".join(f"[rank1]: {line}\n" for line in traceback.splitlines())
    assert last_lines(f"loading\n{traceback}bye\n", traceback) == ("loading", "bye")
    assert last_lines(f"loading\n\x1b[31m{ranked}\x1b[0m", traceback) == ("loading",)
    assert last_lines("loading\n", "\n \n") == ("loading",)


def test_a_node_that_is_gone():
    gone = node_failure("node-c", 3, "its lease has ended")
    assert gone.is_node
    assert not FAILURE.is_node
    assert gone.sentence() == "node-c failed: its lease has ended"
    assert Failure.from_json(gone.to_json()) == gone
