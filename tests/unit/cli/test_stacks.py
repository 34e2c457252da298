"""The stacks of ranks as text and as JSON."""

import json
from dataclasses import replace

import pytest

from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.cli import main
from torchelastic.cli.commands import stacks
from torchelastic.cli.commands.stacks import as_json, only, text
from torchelastic.events.analysis.hangs import RANKS_LIMIT, STACK_LIMIT, Collective, RankActivity

REDUCE, BEFORE = Collective("all_reduce", 17), Collective("all_reduce", 16)
WAITS = {"step": 4, "waits": REDUCE, "launched": (REDUCE,), "stack": "main thread:\n  waits"}
FOUND = WorldActivity(
    3,
    (
        RankActivity(rank=0, node="a", **WAITS),
        RankActivity(rank=1, node="a", step=4, launched=(BEFORE,), stack="main thread:\n  sleeps"),
        RankActivity(rank=2, node="b", **WAITS),
        RankActivity(rank=3, node="b", frozen=True, stack="it is frozen"),
    ),
    ("c",),
)


def test_equal_stacks_are_shown_once():
    assert text(FOUND) == (
        "ranks 0, 2, the same stack\n"
        "  rank 0: node a, step 4, waiting in all_reduce #17\n"
        "  rank 2: node b, step 4, waiting in all_reduce #17\n"
        "    main thread:\n"
        "      waits\n"
        "\n"
        "rank 1\n"
        "  node a, step 4, last collective all_reduce #16\n"
        "    main thread:\n"
        "      sleeps\n"
        "\n"
        "rank 3\n"
        "  node b, frozen\n"
        "    it is frozen\n"
        "\n"
        "not reached: c"
    )


def test_one_rank():
    assert text(only(FOUND, 1)).startswith("rank 1\n")


@pytest.mark.parametrize(
    ("unheard", "said"),
    [
        ((), "Rank 99 does not exist: the world has ranks 0-3."),
        (("c",), "Rank 99 not found. Found: ranks 0-3; not reached: c."),
    ],
)
def test_a_missing_rank_is_an_error(unheard, said, monkeypatch, capsys):
    found = replace(FOUND, unheard=unheard)
    monkeypatch.setattr(stacks, "ask", lambda job, given: found)
    assert main(["stacks", "--rank", "99"]) == 64
    assert said in capsys.readouterr().err


def test_json_has_all_ranks_and_their_whole_stacks():
    assert RANKS_LIMIT < 1100
    assert STACK_LIMIT < 8100
    many = [RankActivity(rank=rank, node="a", stack=f"{rank}".zfill(8100)) for rank in range(1100)]
    shown = json.loads(as_json(WorldActivity(3, tuple(many))))
    assert [(row["rank"], row["stack"]) for row in shown["ranks"]] == [
        (one.rank, one.stack) for one in many
    ]
    shown = json.loads(as_json(FOUND))
    assert shown["generation"] == 3
    assert shown["unheard"] == ["c"]
    assert shown["ranks"][0] == {
        "rank": 0,
        "node": "a",
        "step": 4,
        "collective": "all_reduce #17",
        "waiting": True,
        "stack": "main thread:\n  waits",
    }


@pytest.mark.parametrize(("found", "code"), [(FOUND, 0), (WorldActivity(), 1)])
def test_the_command(found, code, monkeypatch, capsys):
    monkeypatch.setattr(stacks, "ask", lambda job, given: found)
    assert main(["stacks"]) == code
    assert ("ranks 0, 2" if code == 0 else "no ranks to show") in capsys.readouterr().out


def test_user_text_in_stacks_cannot_control_the_terminal(monkeypatch, capsys):
    hostile = WorldActivity(
        0, (RankActivity(rank=0, node="\x1b[2J", stack="\x1b]0;x\x07"),), ("\x1b[1m",)
    )
    monkeypatch.setattr(stacks, "ask", lambda job, given: hostile)
    main(["stacks"])
    main(["stacks", "--json"])
    assert "\x1b" not in capsys.readouterr().out


def test_a_job_without_an_agent_here_cannot_be_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "events.jsonl").touch()
    assert main(["stacks", str(tmp_path)]) == 64
    assert "No agent of that job runs on this machine" in capsys.readouterr().err
