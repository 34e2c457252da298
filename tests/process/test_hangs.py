"""Ranks that keep the others waiting: who it is, and what all of them were doing, is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.jobs import Job, Node, job
from tests.support import poll_for

SCRIPT = Path(__file__).with_name("stuck.py")
#: With agents that wait for stacks and answers as long as it takes.
PROGRAM = Path(__file__).with_name("patient.py")
ONE_NODE = "--nnodes=1 --nproc-per-node=2"
TWO_NODES = "--nnodes=2 --nproc-per-node=1 --settle=60"
#: More than a step takes on a busy machine.
LIMIT = "--progress-timeout=5"

pytestmark = pytest.mark.timeout(300)


@contextmanager
def stuck(directory: Path, flags: str, how: str):
    with job(directory, flags, script=SCRIPT) as made:
        made.program = [str(PROGRAM)]
        for _ in range(2 if "--nnodes=2" in flags else 1):
            start(made, how)
        poll_for(lambda: made.lines(event="step", rank=1, step=3), what="steps", timeout=90)
        yield made


def start(made: Job, how: str) -> Node:
    lines, orders = made.directory / "lines", made.directory / "orders"
    return made.start(script=[str(SCRIPT), str(lines), str(orders), how])


def order(made: Job, what: str) -> None:
    (made.directory / "orders" / what).touch()


def pid_of(made: Job, rank: int) -> int:
    return made.lines(event="step", rank=rank)[0]["pid"]


def told(made: Job, kind: str) -> list[dict]:
    return [event for node in made.nodes for event in node.events(kind)]


def hang(made: Job) -> dict:
    found = poll_for(lambda: told(made, "hang"), what="a hang", timeout=90)
    assert len(found) == 1, made.said()
    return found[0]


def goes_on(made: Job) -> None:
    """In another generation, with all ranks."""
    for rank in (0, 1):
        poll_for(
            lambda rank=rank: [
                line for line in made.lines(event="step", rank=rank) if line["generation"] > 0
            ],
            what=f"a step of rank {rank} in a later generation",
            timeout=90,
        )


def finish(made: Job) -> None:
    order(made, "finish")
    for node in made.nodes:
        assert node.wait(90) == 0, made.said()


def stack_of(event: dict, rank: int) -> str:
    [row] = [row for row in event["ranks"] if row["rank"] == rank]
    return event["stacks"][row["stack"]]


def stacks(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "stacks", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def shown(job_id: str) -> dict:
    """What is told for programs."""
    asked = stacks(job_id, "--json")
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


# --- torchelastic.train --------------------------------------------------------------------------


def test_who_sleeps_instead_of_entering_a_collective_is_missing_from_it(tmp_path):
    with stuck(tmp_path, f"{ONE_NODE} {LIMIT}", "resident") as made:
        order(made, "sleep")
        event = hang(made)
        assert event["missing"] == [1]
        assert event["text"].startswith("rank 1 is missing from all_reduce #")
        assert event["text"].endswith("in which rank 0 waits")
        assert "in sleep_for_ever" in stack_of(event, 1)
        assert "in all_reduce" in stack_of(event, 0)
        assert event["ranks"][0]["waiting"]
        assert not event["ranks"][1]["waiting"]
        [killed] = poll_for(lambda: told(made, "worker-killed"), what="its end")
        assert event["text"] in killed["reason"]
        assert "in sleep_for_ever" in killed["stack"]
        goes_on(made)
        finish(made)


@pytest.mark.slow
def test_a_frozen_rank_of_another_node_is_missing_and_both_nodes_tell_what_theirs_do(tmp_path):
    with stuck(tmp_path, f"{TWO_NODES} {LIMIT}", "resident") as made:
        frozen = pid_of(made, 1)
        os.kill(frozen, signal.SIGSTOP)
        event = hang(made)
        assert event["text"].startswith("rank 1 (frozen) is missing from all_reduce #")
        assert "in all_reduce" in stack_of(event, 0)
        assert len({row["node"] for row in event["ranks"]}) == 2
        poll_for(lambda: told(made, "worker-killed"), what="its end")
        goes_on(made)
        finish(made)


@pytest.mark.slow
def test_ranks_that_call_different_collectives_are_told_so_and_nobody_is_killed(tmp_path):
    flags = f"{ONE_NODE} {LIMIT} --shutdown-timeout=1"  # in the end they are stuck
    with stuck(tmp_path, flags, "resident") as made:
        order(made, "other")
        event = hang(made)
        assert event["text"].startswith("the ranks call different collectives (rank 0 in all")
        assert "rank 1 in broadcast #" in event["text"]
        assert event["missing"] == []
        assert told(made, "worker-killed") == []


# --- scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sleep", pytest.param("freeze", marks=pytest.mark.slow)], ids=str)
def test_a_script_that_keeps_its_state_is_watched_too(tmp_path, how):
    with stuck(tmp_path, f"{ONE_NODE} {LIMIT}", "kept") as made:
        if how == "sleep":
            order(made, "sleep")
        else:
            os.kill(pid_of(made, 1), signal.SIGSTOP)
        event = hang(made)
        assert event["missing"] == [1]
        who = "rank 1" if how == "sleep" else "rank 1 (frozen)"
        assert event["text"] == f"{who} is missing from all_reduce, in which rank 0 waits"
        [killed] = poll_for(lambda: told(made, "worker-killed"), what="its end")
        assert killed["rank"] == 1
        goes_on(made)
        finish(made)


# --- by hand -------------------------------------------------------------------------------------


def test_what_the_ranks_of_both_nodes_do_can_be_asked_while_they_train(tmp_path):
    with stuck(tmp_path, TWO_NODES, "resident") as made:
        job_id = f"job{made.port}"
        found = shown(job_id)
        assert [row["rank"] for row in found["ranks"]] == [0, 1]
        assert all("stuck.py" in row["stack"] for row in found["ranks"])
        assert all(row["step"] >= 3 for row in found["ranks"])
        assert all("#" in row["collective"] for row in found["ranks"])
        assert len({row["node"] for row in found["ranks"]}) == 2
        assert found["unheard"] == []
        os.kill(pid_of(made, 1), signal.SIGSTOP)
        poll_for(lambda: ", frozen" in stacks(job_id).stdout, what="a frozen rank", timeout=60)
        poll_for(
            lambda: "waits in all_reduce #" in stacks(job_id).stdout, what="who waits", timeout=60
        )
        os.kill(pid_of(made, 1), signal.SIGCONT)
        assert stacks(job_id, "--rank=0").stdout.startswith("rank 0\n")
        assert "There is no rank 7: the world has ranks 0, 1." in stacks(job_id, "--rank=7").stderr
        assert told(made, "worker-killed") == []


def test_a_plain_script_can_be_asked_and_goes_on(tmp_path):
    with stuck(tmp_path, f"{ONE_NODE} --rdzv-id=plain-{os.getpid()}", "plain") as made:
        asked = stacks(f"plain-{os.getpid()}")
        assert asked.returncode == 0, asked.stderr
        assert "main thread, most recent call first:" in asked.stdout
        assert "stuck.py" in asked.stdout
        finish(made)


def test_nobody_answers_for_a_job_that_is_not_there():
    asked = stacks("no-such-job")
    assert asked.returncode == 2
    assert "knows no job 'no-such-job'" in asked.stderr
