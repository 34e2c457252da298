"""Stragglers in real jobs: one worker sleeps in its steps, and is found, named and replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import Job, Node, job
from tests.support import poll_for
from torchelastic.events.log import read_job
from torchelastic.events.view import JobView, fold

PACED = Path(__file__).with_name("paced.py")
PATIENCE = 120.0
#: Seconds of a step, and what a slow worker takes more.
PAUSE, MORE = 0.03, 0.5

#: Several workers import torch at the same time, on however few cores; and it takes some seconds to
#: be sure that somebody is slow.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(it: Job, way: str, *, slow: str = "none", flags: str = "") -> Node:
    keys = [f"way={way}", f"pause={PAUSE}", f"more={MORE}", "since=5", f"slow={slow}"]
    script = [str(PACED), str(it.directory / "lines"), str(it.directory / "orders"), *keys]
    return it.start(flags, script=script)


def order(it: Job, what: str) -> None:
    (it.directory / "orders" / what).touch()


def named(node: Node, rank: int, *, over: bool = False) -> list[dict[str, Any]]:
    said = node.events("straggler")
    return [one for one in said if one["rank"] == rank and one["over"] == over]


def wait_for_name(node: Node, rank: int, *, over: bool = False) -> dict[str, Any]:
    what = f"rank {rank} is named{' no more' if over else ''}"
    try:
        return poll_for(lambda: named(node, rank, over=over), what=what, timeout=PATIENCE)[0]
    except AssertionError as error:
        raise AssertionError(f"{error}; it said:\n{node.stderr}") from None


def steps(it: Job) -> list[tuple[int, int]]:
    """Every step that was done by a rank, whatever the generation."""
    return sorted((line["step"], line["rank"]) for line in it.lines(event="step"))


def check_numbers(slow: dict[str, Any]) -> None:
    """It has slept so long in each step, at least; and the others have waited for it."""
    assert slow["seconds_per_step"] >= PAUSE + MORE
    assert slow["usual"] < slow["seconds_per_step"] / 1.5
    assert slow["cost"] > slow["seconds_per_step"] - slow["usual"]
    assert slow["lost"] > 0


def picture(node: Node, upto: dict[str, Any]) -> JobView:
    """As it was when this was said."""
    records = read_job(node.directory / "logs")
    return fold(record for record in records if record.mono <= upto["mono"])


def test_a_worker_that_is_slow_is_named_while_it_is(tmp_path):
    """In `train`, on one node, whose own log is the whole story."""
    with job(tmp_path, "--standalone --nproc-per-node=3") as it:
        node = start(it, "train", slow="1")
        slow = wait_for_name(node, 1)
        check_numbers(slow)
        assert slow["text"] in node.stderr
        assert 1 in [shown.rank for shown in picture(node, slow).stragglers]
        order(it, "well")
        over = wait_for_name(node, 1, over=True)
        assert over["cost"] >= slow["cost"]
        order(it, "stop")
        assert node.wait() == 0, node.stderr
        view = picture(node, over)
        assert 1 not in [shown.rank for shown in view.stragglers]
        assert view.straggler_seconds >= over["lost"] > 0


def test_a_script_that_commits_is_seen_as_well(tmp_path):
    """Two nodes, of which one leads and is told; there is no spare, and it says so once."""
    with job(tmp_path, "--nnodes=2 --replace-stragglers") as it:
        leader, other = start(it, "script"), start(it, "script", slow="any")
        poll_for(lambda: other.events("joined"), what="the other joins", timeout=PATIENCE)
        name = other.events("joined")[0]["name"]
        slow = poll_for(
            lambda: [one for one in leader.events("straggler") if one["name"] == name],
            what="a straggler",
            timeout=PATIENCE,
        )[0]
        check_numbers(slow)
        lament = f"there is no spare node that could take the place of {name}"
        poll_for(lambda: lament in leader.stderr, what="that is said", timeout=PATIENCE)
        order(it, "stop")
        assert [node.wait() for node in it.nodes] == [0, 0]
        assert leader.stderr.count(lament) == 1
        assert other.events("straggler") == [], "the leader says it"


@pytest.mark.parametrize("way", ["train", "script"])
def test_a_spare_takes_the_place_of_a_slow_node_once_and_for_free(tmp_path, way):
    with job(tmp_path, "--nnodes=2 --replace-stragglers --max-restarts=0") as it:
        first = start(it, way)
        start(it, way, slow="any")
        it_trains = lambda: it.lines(event="step")  # noqa: E731
        poll_for(it_trains, what="the first two train", timeout=PATIENCE)
        spare = start(it, way)
        formed = poll_for(
            lambda: [one for one in first.events("world-formed") if one["generation"] == 1],
            what="the next world",
            timeout=PATIENCE,
        )[0]
        name = spare.events("joined")[0]["name"]
        assert name in formed["nodes"]
        assert len(formed["nodes"]) == 2
        assert formed["restarts_used"] == 0
        assert formed["reason"].startswith(f"{formed['spares'][0]} is slow and gives its place to")
        seen = lambda: it.lines(event="step", generation=1, rank=1)  # noqa: E731
        poll_for(lambda: len(seen()) > 20, what="training goes on", timeout=PATIENCE)
        order(it, "stop")
        assert [node.wait() for node in it.nodes] == [0, 0, 0], it.said()
        assert [one["generation"] for one in first.events("world-formed")] == [0, 1]
        check_steps(steps(it), way)


def check_steps(done: list[tuple[int, int]], way: str) -> None:
    """Every step was done by both ranks: in `train` once; in a script that is stopped before it has
    committed one, that one again."""
    last = done[-1][0]
    expected = [(step, rank) for step in range(last + 1) for rank in (0, 1)]
    assert sorted(set(done)) == expected
    assert len(done) <= len(expected) + (2 if way == "script" else 0)
