"""Stragglers in real jobs: one worker sleeps in its steps, and is found, named and replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.process.jobs import HERE, Job, Node, job
from torchelastic.events.analysis.view import JobView, fold
from torchelastic.events.log import read_job

PACED = HERE / "paced.py"
PATIENCE = 120.0
#: Seconds of a step, and what a slow worker takes more: both are long beside what a busy machine
#: takes or leaves a worker, or who is well would not look so.
PAUSE, MORE = 0.1, 0.5
#: Events of a node that are shown when something is not seen in time: steps are among them.
SHOWN = 60

T = TypeVar("T")

#: Several workers import torch at the same time, on however few cores; and it takes some seconds to
#: be sure that somebody is slow.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(it: Job, way: str, *, slow: str = "none", flags: str = "") -> Node:
    return it.start(flags, way=way, pause=PAUSE, more=MORE, since=5, slow=slow)


def wait_for(it: Job, condition: Callable[[], T], what: str) -> T:
    """Who waits in vain learns what all nodes said and saw; at once, where one has ended."""

    def seen() -> T:
        found = condition()
        ended = [node for node in it.nodes if node.process.poll() is not None]
        if not found and ended and not (found := condition()):
            raise AssertionError(f"a node has ended before this was seen: {what}")
        return found

    try:
        return it.wait_for(seen, what, PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{seen_by(it)}") from None


def wait_for_end(it: Job) -> None:
    codes = [node.wait() for node in it.nodes]
    assert codes == [0] * len(codes), f"{it.said()}\n{seen_by(it)}"


def seen_by(it: Job) -> str:
    """The last events of every node."""
    return "\n".join(
        f"--- node {place} wrote:\n" + "\n".join(map(json.dumps, node.events()[-SHOWN:]))
        for place, node in enumerate(it.nodes)
    )


def named(node: Node, rank: int, *, over: bool = False) -> list[dict[str, Any]]:
    said = node.events("straggler")
    return [one for one in said if one["rank"] == rank and one["over"] == over]


def wait_for_name(it: Job, rank: int, *, over: bool = False) -> dict[str, Any]:
    what = f"rank {rank} is named{' no more' if over else ''}"
    return wait_for(it, lambda: named(it.nodes[0], rank, over=over), what)[0]


def steps(it: Job) -> list[tuple[int, int]]:
    """Every step that was done by a rank, whatever the generation."""
    return sorted((line["step"], line["rank"]) for line in it.lines(event="step"))


def check_numbers(slow: dict[str, Any]) -> None:
    """It has slept so long in each step, at least; and the others have waited for it. A step that
    began before the first sample counts, without all of its time."""
    assert slow["seconds_per_step"] >= MORE
    assert slow["usual"] < slow["seconds_per_step"] / 1.5
    assert slow["cost"] > slow["seconds_per_step"] - slow["usual"]
    assert slow["lost"] > 0


def picture(node: Node, upto: dict[str, Any]) -> JobView:
    """As it was when this was said."""
    records = read_job(node.directory / "logs")
    return fold(record for record in records if record.mono <= upto["mono"])


def test_a_worker_that_is_slow_is_named_while_it_is(tmp_path):
    """In `train`, on one node, whose own log is the whole story."""
    with job(tmp_path, "--standalone --nproc-per-node=3", PACED) as it:
        node = start(it, "train", slow="1")
        slow = wait_for_name(it, 1)
        check_numbers(slow)
        assert slow["text"] in node.stderr
        assert 1 in [shown.rank for shown in picture(node, slow).stragglers]
        it.give("well")
        over = wait_for_name(it, 1, over=True)
        assert over["cost"] >= slow["cost"]
        it.give("stop")
        wait_for_end(it)
        view = picture(node, over)
        assert 1 not in [shown.rank for shown in view.stragglers]
        assert view.straggler_seconds >= over["lost"] > 0


def test_a_script_that_commits_is_seen_as_well(tmp_path):
    """Two nodes, of which one leads and is told; there is no spare, and it says so once."""
    with job(tmp_path, "--nnodes=2 --replace-stragglers", PACED) as it:
        leader, other = start(it, "script"), start(it, "script", slow="any")
        wait_for(it, lambda: other.events("joined"), "the other joins")
        name = other.events("joined")[0]["name"]
        told = lambda: [one for one in leader.events("straggler") if one["name"] == name]  # noqa: E731
        slow = wait_for(it, told, "a straggler")[0]
        check_numbers(slow)
        lament = f"no spare node can replace the slow {name}"
        wait_for(it, lambda: lament in leader.stderr, "that is said")
        it.give("stop")
        wait_for_end(it)
        assert leader.stderr.count(lament) == 1
        assert other.events("straggler") == [], "the leader says it"


def test_a_spare_takes_the_place_of_a_slow_node_once_and_for_free(tmp_path):
    with job(tmp_path, "--nnodes=2 --replace-stragglers --max-restarts=0", PACED) as it:
        first = start(it, "train")
        start(it, "train", slow="any")
        wait_for(it, lambda: it.lines(event="step"), "the first two train")
        spare = start(it, "train")
        worlds = lambda: first.events("world-formed")  # noqa: E731
        formed = wait_for(it, lambda: worlds()[1:], "the next world")[0]
        assert formed["generation"] == 1
        name = spare.events("joined")[0]["name"]
        assert name in formed["nodes"]
        assert len(formed["nodes"]) == 2
        assert formed["restarts_used"] == 0
        assert f" slow {formed['spares'][0]}" in formed["reason"]
        seen = lambda: it.lines(event="step", generation=1, rank=1)  # noqa: E731
        wait_for(it, lambda: len(seen()) > 20, "training goes on")
        it.give("stop")
        wait_for_end(it)
        assert [one["generation"] for one in worlds()] == [0, 1]
        done = steps(it)
        assert done == [(step, rank) for step in range(done[-1][0] + 1) for rank in (0, 1)]
