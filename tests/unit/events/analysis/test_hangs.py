"""Who is missing from the collective that the others wait in."""

import json
from dataclasses import replace

import pytest

from torchelastic.events import types as events
from torchelastic.events.analysis import hangs
from torchelastic.events.analysis.hangs import (
    Collective,
    RankActivity,
    collective_in,
    diagnose,
    event_of,
    first_in_line,
    tidy,
    where,
)

REDUCE = Collective("all_reduce", 17)
BEFORE = Collective("all_reduce", 16)
NOTHING = "no stack could be read"


def waiting(rank, at=REDUCE, launched=None, node="a"):
    return RankActivity(rank=rank, node=node, step=4, waits=at, launched=launched or (at,))


def working(rank, launched=BEFORE, node="a", **more):
    return RankActivity(rank=rank, node=node, step=4, launched=(launched,), **more)


def shown(rank, function, *, file="torch/distributed/distributed_c10d.py"):
    frame = f'main thread, most recent call first:\n  File "/x/{file}", line 7 in {function}'
    return RankActivity(
        rank=rank, node="a", stack=f'{frame}\n  File "train.py", line 3 in <module>'
    )


def unread(rank, stack=NOTHING, **more):
    return RankActivity(rank=rank, node="a", stack=stack, **more)


def by_itself(rank):
    return RankActivity(rank=rank, node="a", stack='  File "train.py", line 9 in <module>')


GROUP = Collective("broadcast", 3, "2")

CASES = {
    "one is missing": (
        [waiting(0), waiting(1), working(2)],
        "rank 2 is missing from all_reduce #17, in which ranks 0, 1 wait",
        (2,),
    ),
    "several are": (
        [waiting(0), *(working(rank) for rank in range(1, 5))],
        "ranks 1-4 are missing from all_reduce #17, in which rank 0 waits",
        (1, 2, 3, 4),
    ),
    "it is frozen, in the same": (
        [waiting(0), RankActivity(rank=1, node="b", waits=REDUCE, launched=(REDUCE,), frozen=True)],
        "rank 1 (frozen) is missing from all_reduce #17, in which rank 0 waits",
        (1,),
    ),
    "it waits for what came before": (
        [waiting(0), waiting(1, BEFORE)],
        # Rank 0 is done with 16: what rank 1 waits for was sent, and has not come.
        "rank 0 waits in all_reduce #17, rank 1 waits in all_reduce #16; no rank is missing",
        (),
    ),
    "of a group, members only": (
        [
            waiting(0, GROUP, (GROUP, BEFORE)),
            RankActivity(rank=1, node="a", launched=(BEFORE, Collective("", 2, "2"))),
            working(2),
        ],
        "rank 1 is missing from broadcast #3 of group 2, in which rank 0 waits",
        (1,),
    ),
    "it is frozen, and not in the first group": (
        [
            waiting(0, GROUP, (GROUP, BEFORE)),
            waiting(2, Collective("broadcast", 3, "3")),
            RankActivity(rank=1, node="a", launched=(Collective("", 2, "3"),), frozen=True),
        ],
        "rank 1 (frozen) is missing from broadcast #3 of group 3, in which rank 2 waits",
        (1,),
    ),
    "groups in another order": (
        [waiting(0, GROUP, (GROUP, BEFORE)), waiting(1, REDUCE, (REDUCE, Collective("", 2, "2")))],
        "rank 0 waits in broadcast #3 of group 2, rank 1 waits in all_reduce #17: they wait for "
        "each other, in different groups",
        (),
    ),
    "one group waits for another": (
        [
            *(waiting(rank, GROUP, (GROUP, BEFORE)) for rank in (0, 1)),
            *(waiting(rank, REDUCE, (REDUCE,)) for rank in (2, 3)),
        ],
        "ranks 0, 1 are missing from all_reduce #17, in which ranks 2, 3 wait",
        (0, 1),
    ),
    "all wait": (
        [waiting(0), waiting(1)],
        "ranks 0, 1 wait in all_reduce #17; no rank is missing: check the network between the "
        "nodes",
        (),
    ),
    "different collectives": (
        [waiting(0), waiting(1, Collective("broadcast", 17))],
        "the ranks call different collectives (rank 0 in all_reduce #17; rank 1 in broadcast #17)"
        ": all ranks must call the same collectives in the same order",
        (),
    ),
    "different, and one has gone on by itself": (
        [waiting(0), working(1, Collective("broadcast", 17))],
        "the ranks call different collectives (rank 0 in all_reduce #17; rank 1 in broadcast #17)",
        (),
    ),
    "nobody waits": (
        [working(0), working(1)],
        "no rank waits in a collective: ranks 0, 1 are outside any collective",
        (),
    ),
    "launched, and went on": (
        [waiting(0), working(1, REDUCE)],
        "rank 0 waits in all_reduce #17; no rank is missing from it; rank 1 is outside any "
        "collective",
        (1,),
    ),
    "by their stacks": (
        [shown(0, "all_reduce"), shown(1, "all_reduce"), by_itself(2)],
        "rank 2 is missing from all_reduce, in which ranks 0, 1 wait",
        (2,),
    ),
    "by their stacks, different": (
        [shown(0, "all_reduce"), shown(1, "broadcast")],
        "the ranks call different collectives (rank 0 in all_reduce; rank 1 in broadcast)",
        (),
    ),
    "between two": (
        [shown(0, "recv"), shown(1, "barrier")],
        "rank 0 waits in recv, rank 1 waits in barrier; no rank is missing",
        (),
    ),
    "in a backward": (
        [shown(0, "_engine_run_backward", file="torch/autograd/graph.py"), by_itself(1)],
        "rank 1 is missing from backward, in which rank 0 waits",
        (1,),
    ),
    "nobody is known": ([], "no rank waits in a collective", ()),
    "one shows nothing": (
        [shown(0, "all_reduce"), by_itself(1), unread(2)],
        "rank 1 is missing from all_reduce, in which rank 0 waits; rank 2 could not be inspected",
        (1,),
    ),
    "all others wait": (
        [shown(0, "all_reduce"), unread(1), unread(2)],
        "rank 0 waits in all_reduce; ranks 1, 2 could not be inspected",
        (),
    ),
    "by what another program writes": (
        [shown(0, "all_reduce"), unread(1, 'Thread 7 (idle): "MainThread"\n  f (train.py:7)')],
        "rank 0 waits in all_reduce; rank 1 could not be inspected",
        (),
    ),
    "different ones, but not of all": (
        [shown(0, "all_reduce"), shown(1, "broadcast"), unread(2)],
        "rank 0 waits in all_reduce, rank 1 waits in broadcast; rank 2 could not be inspected",
        (),
    ),
    "nothing is seen": (
        [unread(0)],
        "no rank waits in a collective; rank 0 could not be inspected",
        (),
    ),
    "its number tells enough": (
        [waiting(0), working(1, stack=NOTHING)],
        "rank 1 is missing from all_reduce #17, in which rank 0 waits",
        (1,),
    ),
    "frozen, without a stack": (
        [shown(0, "all_reduce"), unread(1, frozen=True)],
        "rank 1 (frozen) is missing from all_reduce, in which rank 0 waits",
        (1,),
    ),
}


def test_diagnosis_names_missing_ranks():
    for case, (activities, text, missing) in CASES.items():
        found = diagnose(activities)
        assert found.text.startswith(text), case
        assert found.missing == missing, case


def test_only_ranks_that_wait_for_each_other_are_in_a_deadlock():
    assert {case for case, (activities, *_) in CASES.items() if diagnose(activities).deadlock} == {
        "groups in another order",
        "different collectives",
        "by their stacks, different",
    }
    different = CASES["different collectives"][0]
    assert not diagnose(different, ["node-c"]).deadlock, "it may be missing"


@pytest.mark.parametrize(
    ("steps", "rank"), [((4, 4, 4), 0), ((4, 5, 5), 1), ((None, 3, 4), 2), ((None, None, None), 0)]
)
def test_the_rank_whose_time_is_up_first_speaks_for_all(steps, rank):
    activities = [
        RankActivity(rank=number, node="a", step=step) for number, step in enumerate(steps)
    ]
    assert first_in_line(activities) == rank


def test_nodes_that_do_not_answer_are_named():
    different = [waiting(0), waiting(1, Collective("broadcast", 17))]
    for activities, text in (
        ([waiting(0)], "rank 0 waits in all_reduce #17; b, c did not answer"),
        (different, "the ranks call different collectives"),
        ([waiting(0), working(1)], "rank 1 is missing from all_reduce #17, in which rank 0 waits;"),
    ):
        said = diagnose(activities, ["b", "c"]).text
        assert said.startswith(text)
        assert "b, c did not answer" in said
    said = diagnose([waiting(0)], [f"node-{number}" for number in range(100)]).text
    assert said.endswith("node-6, node-7 and 92 more did not answer")


# --- stacks --------------------------------------------------------------------------------------

DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "/v/torchelastic/training/control.py", line 1 in _hear

Thread 0x00007f02 (most recent call first):
  File "/v/threading.py", line 2 in wait

Current thread 0x00007f03 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 5 in all_gather
  File "/v/torch/distributed/c10d_logger.py", line 6 in wrapper
  File "/v/torch/distributed/distributed_c10d.py", line 7 in all_gather_object
  File "/v/torch/distributed/c10d_logger.py", line 6 in wrapper
  File "/x/train.py", line 4 in <module>
"""


def test_a_stack_shows_the_main_thread_first_and_no_addresses():
    lines = tidy(DUMP).splitlines()
    assert lines[0] == "main thread, most recent call first:"
    assert "all_gather" in lines[1]
    assert lines[-2:] == ["another thread:", '  File "/v/threading.py", line 2 in wait']
    assert "0x" not in tidy(DUMP)
    assert "control.py" not in tidy(DUMP)
    assert tidy(DUMP) == tidy(DUMP.replace("0x00007f0", "0x00007e1"))
    frame = '  File "/x/train.py", line 4 in <module>'
    told = tidy(f"Stack (most recent call first):\n{frame}\n")
    assert told == f"main thread, most recent call first:\n{frame}"
    assert tidy(" it is frozen\n") == "it is frozen"


def test_stack_shows_innermost_frame_of_main_thread():
    frame = tidy('Stack (most recent call first):\n  File "/a b/x.py", line 3 in f\n')
    assert where(frame) == "f (x.py, line 3)"
    assert where('main thread:\nanother thread:\n  File "x.py", line 3 in f') == ""
    assert where("no stack could be read") == ""


def test_the_outermost_collective_is_what_a_thread_is_in():
    assert collective_in(tidy(DUMP)) == Collective("all_gather_object")
    assert collective_in('  File "/x/train.py", line 4 in <module>') is None
    assert collective_in("") is None


# --- the event -----------------------------------------------------------------------------------


def test_an_event_has_equal_stacks_once_and_its_view_has_them_with_their_ranks():
    last = RankActivity(rank=2, node="b", step=3, launched=(BEFORE,), stack="asleep")
    event = event_of([last, *(replace(waiting(rank), stack="waits") for rank in (1, 0))])
    assert sorted(event.stacks) == ["asleep", "waits"]
    assert events.from_fields("hang", json.loads(json.dumps(event.fields()))) == event
    seen = hangs.part(event)
    assert seen["missing"] == [2]
    assert seen["text"] == event.text
    assert seen["ranks"][2] == {
        "rank": 2,
        "node": "b",
        "step": 3,
        "collective": "all_reduce #16",
        "waiting": False,
        "missing": True,
        "stack": "asleep",
    }
    assert [row["stack"] for row in seen["ranks"]] == ["waits", "waits", "asleep"]


def test_an_event_stays_small_and_keeps_the_stacks_of_who_is_missing():
    many = [replace(waiting(rank), stack=f"{rank} " * 1000) for rank in range(2000)]
    event = event_of([*many, working(2000, stack="the cause")])
    assert len(json.dumps(event.fields())) < 900_000
    last = hangs.part(event)["ranks"][-1]
    assert (last["rank"], last["stack"]) == (2000, "the cause")


def test_a_stack_that_is_not_there_is_empty():
    rows = [{"rank": 0, "stack": place} for place in (None, -1, 7, "0")]
    event = events.Hang(text="", missing=[], ranks=rows, stacks=["x"])
    assert [row["stack"] for row in hangs.part(event)["ranks"]] == [""] * 4
