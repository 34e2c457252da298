"""SIGTERM to one agent, or to all: the state is in storage before the workers that have it go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.jobs import Job, job
from tests.support import poll_for
from torchelastic.checkpoint import FileSystemCheckpointManager

KEPT, COUNTING = (Path(__file__).with_name(name) for name in ("kept.py", "counting.py"))
#: The script has taken checkpoints of steps 3 and 6 by itself when it is held there.
HELD, STEPS = 8, 10
PATIENCE = 90.0

#: Several workers import torch at the same time, on however few cores.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def stored(tmp_path):
    return FileSystemCheckpointManager(tmp_path / "checkpoints")


def steps_of(stored):
    return [found.step for found in stored.list_checkpoints()]


def kept(made: Job, stored, **keys) -> list[str]:
    words = [f"{name}={value}" for name, value in {"steps": STEPS, **keys}.items()]
    lines, orders = made.directory / "lines", made.directory / "orders"
    return [str(KEPT), str(lines), str(orders), f"checkpoints={stored.directory}", *words]


def held_in_a_step(made: Job, stored, nodes: int, *, ranks: int, **keys) -> None:
    """Start nodes, and wait until all their workers wait between two collectives."""
    for _ in range(nodes):
        made.start(script=kept(made, stored, hold=HELD, **keys))
    poll_for(
        lambda: len(made.lines(event="holding", world_size=ranks)) == ranks,
        what=f"{ranks} ranks that wait",
        timeout=PATIENCE,
    )
    poll_for(lambda: steps_of(stored)[:2] == [6, 3], what="the script's own checkpoints")


def starts(made: Job, generation: int = 0) -> list[int]:
    return [line["step"] for line in made.lines(event="start", generation=generation)]


def test_the_workers_of_a_script_store_what_they_keep(stored, tmp_path):
    flags = "--nnodes=1 --nproc-per-node=2"
    with job(tmp_path / "first", flags) as first:
        held_in_a_step(first, stored, 1, ranks=2)
        first.nodes[0].process.terminate()
        assert first.nodes[0].wait(PATIENCE) == 143, first.said()
    assert steps_of(stored) == [HELD, 6, 3]
    with job(tmp_path / "second", flags) as second:
        node = second.start(script=kept(second, stored))
        assert node.wait(PATIENCE) == 0, node.stderr
    assert starts(second) == [HELD, HELD]
    ends = second.lines(event="end")
    assert [(end["step"], end["position"]) for end in ends] == [(STEPS, STEPS)] * 2


def test_of_many_nodes_that_leave_one_stores_the_state(stored, tmp_path):
    flags = "--nnodes=2 --nproc-per-node=1"
    with job(tmp_path / "first", flags) as first:
        held_in_a_step(first, stored, 2, ranks=2)
        for node in first.nodes:
            node.process.terminate()
        assert [node.wait(PATIENCE) for node in first.nodes] == [143, 143], first.said()
    assert steps_of(stored) == [HELD, 6, 3]


def test_one_node_leaves_and_the_others_go_on_from_memory(stored, tmp_path):
    """What the one that left has stored is void or not: either way nobody needs it."""
    with job(tmp_path / "job", "--nnodes=1:2 --nproc-per-node=1") as one:
        held_in_a_step(one, stored, 2, ranks=2)
        first, second = one.nodes
        second.process.terminate()
        assert second.wait(PATIENCE) == 143, one.said()
        (one.directory / "orders" / "go").touch()
        assert first.wait(PATIENCE) == 0, one.said()
    last = max(one.lines(event="start"), key=lambda line: line["generation"])
    assert (last["world_size"], last["step"]) == (1, HELD)
    assert [end["step"] for end in one.lines(event="end")] == [STEPS]


@pytest.mark.slow
def test_a_script_that_has_too_little_time_just_goes(stored, tmp_path):
    """The last checkpoint is said to have taken an hour."""
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --shutdown-timeout=20") as one:
        held_in_a_step(one, stored, 1, ranks=2, took=3600)
        one.nodes[0].process.terminate()
        assert one.nodes[0].wait(PATIENCE) == 143, one.said()
    assert steps_of(stored) == [6, 3]


def counting(stored, steps, seconds=0.0) -> list[str]:
    return [str(COUNTING), str(stored.directory), str(steps), str(seconds), "0"]


def begins(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"begin at (\d+) ", text)]


@pytest.mark.slow
def test_resident_workers_of_all_nodes_store_it_once(stored, tmp_path):
    flags = "--nnodes=2 --nproc-per-node=1"
    with job(tmp_path / "first", flags) as first:
        for _ in range(2):
            first.start(script=counting(stored, 100_000, 0.01))
        for node in first.nodes:
            poll_for(lambda node=node: begins(node.stdout), what="the training", timeout=PATIENCE)
        for node in first.nodes:
            node.process.terminate()
        assert [node.wait(PATIENCE) for node in first.nodes] == [143, 143], first.said()
    (step,) = steps_of(stored)
    with job(tmp_path / "second", flags) as second:
        for _ in range(2):
            second.start(script=counting(stored, step + 2))
        assert [node.wait(PATIENCE) for node in second.nodes] == [0, 0], second.said()
    assert [begins(node.stdout)[0] for node in second.nodes] == [step, step]
